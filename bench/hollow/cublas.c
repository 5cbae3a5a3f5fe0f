// Matrix products that are counted and not computed: 2 m n k floating-point operations each, by batch.
#include "hollow.h"
#include <stdlib.h>
#include <string.h>

typedef int Enum;  // whatever cuBLAS lists by name; its headers want more of CUDA than the wheels bring
typedef struct { Enum math; Enum pointers; void * stream; } Handle;

static Enum product(double m, double n, double k, double batch) {
  if (hollow_fails(FAULT_PRODUCT)) return ALLOC_FAILED;
  if (hollow_fails(FAULT_BREAK)) return EXECUTION_FAILED;
  hollow_launched("product"), hollow_counts.products++;
  hollow_counts.flops += 2 * m * n * k * batch;
  return 0;
}
API Enum cublasCreate_v2(Handle **to) { *to = calloc(1, sizeof(Handle)); return 0; }
API Enum cublasDestroy_v2(Handle *h) { free(h); return 0; }
API Enum cublasSetStream_v2(Handle *h, void * s) { h->stream = s; return 0; }
API Enum cublasGetStream_v2(Handle *h, void * *s) { *s = h->stream; return 0; }
API Enum cublasSetWorkspace_v2(Handle *h, void *w, size_t n) { (void)h, (void)w, (void)n; return 0; }
API Enum cublasSetMathMode(Handle *h, Enum m) { h->math = m; return 0; }
API Enum cublasGetMathMode(Handle *h, Enum *m) { *m = h->math; return 0; }
API Enum cublasSetPointerMode_v2(Handle *h, Enum m) { h->pointers = m; return 0; }
API Enum cublasGetPointerMode_v2(Handle *h, Enum *m) { *m = h->pointers; return 0; }
API Enum cublasSetSmCountTarget(Handle *h, int n) { (void)h, (void)n; return 0; }
API Enum cublasGemmEx(Handle *h, Enum ta, Enum tb, int m, int n, int k, const void *alpha,
                                const void *A, Enum at, int lda, const void *B, Enum bt, int ldb, const void *beta, void *C,
                                Enum ct, int ldc, Enum compute, Enum algo) {
  return product(m, n, k, 1);
}
API Enum cublasGemmStridedBatchedEx(Handle *h, Enum ta, Enum tb, int m, int n, int k,
                                              const void *alpha, const void *A, Enum at, int lda, long long sa, const void *B,
                                              Enum bt, int ldb, long long sb, const void *beta, void *C, Enum ct, int ldc,
                                              long long sc, int batch, Enum compute, Enum algo) {
  return product(m, n, k, batch);
}
API Enum cublasSgemm_v2(Handle *h, Enum ta, Enum tb, int m, int n, int k, const float *alpha,
                                  const float *A, int lda, const float *B, int ldb, const float *beta, float *C, int ldc) {
  return product(m, n, k, 1);
}
API Enum cublasSgemmEx(Handle *h, Enum ta, Enum tb, int m, int n, int k, const float *alpha,
                                 const void *A, Enum at, int lda, const void *B, Enum bt, int ldb, const float *beta, void *C,
                                 Enum ct, int ldc) {
  return product(m, n, k, 1);
}
API Enum cublasDgemm_v2(Handle *h, Enum ta, Enum tb, int m, int n, int k, const double *alpha,
                                  const double *A, int lda, const double *B, int ldb, const double *beta, double *C, int ldc) {
  return product(m, n, k, 1);
}
API Enum cublasSgemmStridedBatched(Handle *h, Enum ta, Enum tb, int m, int n, int k,
                                             const float *alpha, const float *A, int lda, long long sa, const float *B, int ldb, long long sb,
                                             const float *beta, float *C, int ldc, long long sc, int batch) {
  return product(m, n, k, batch);
}
API Enum cublasSgemv_v2(Handle *h, Enum t, int m, int n, const float *alpha, const float *A, int lda,
                                  const float *x, int incx, const float *beta, float *y, int incy) {
  return product(m, n, 1, 1);
}
API Enum cublasSdot_v2(Handle *h, int n, const float *x, int incx, const float *y, int incy, float *r) { return product(1, 1, n, 1); }
API Enum cublasDotEx(Handle *h, int n, const void *x, Enum xt, int incx, const void *y, Enum yt, int incy,
                               void *r, Enum rt, Enum ex) {
  return product(1, 1, n, 1);
}
