// cuBLASLt's products, counted likewise. Opaque objects are what this file puts behind their pointers.
#include "hollow.h"
#include <stdlib.h>
#include <string.h>

typedef int Enum;
enum { TRANSPOSED_A = 3, BATCH_COUNT = 5 };  // CUBLASLT_MATMUL_DESC_TRANSA, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT (cublasLt.h, 13.1)
enum { FOUND_BYTES = 96 };                   // sizeof(cublasLtMatmulHeuristicResult_t)
typedef struct { uint64_t rows, cols; int32_t batch; } Layout;
typedef struct { int32_t transposed; } Product;

API size_t cublasLtGetVersion(void) { return 130100; }
API Enum cublasLtCreate(void **to) { *to = calloc(1, 64); return 0; }
API Enum cublasLtDestroy(void *h) { free(h); return 0; }
API Enum cublasLtMatrixLayoutCreate(Layout **to, Enum type, uint64_t rows, uint64_t cols, int64_t ld) {
  (void)type, (void)ld;
  Layout *new = calloc(1, 256);
  *new = (Layout){rows, cols, 1};
  *to = new;
  return 0;
}
API Enum cublasLtMatrixLayoutDestroy(Layout *l) { free(l); return 0; }
API Enum cublasLtMatrixLayoutSetAttribute(Layout *l, Enum name, const void *value, size_t n) {
  if (name == BATCH_COUNT && n >= 4) memcpy(&l->batch, value, 4);
  return 0;
}
API Enum cublasLtMatmulDescCreate(Product **to, Enum c, Enum t) {
  (void)c, (void)t;
  *to = calloc(1, 256);
  return 0;
}
API Enum cublasLtMatmulDescDestroy(Product *d) { free(d); return 0; }
API Enum cublasLtMatmulDescSetAttribute(Product *d, Enum name, const void *value, size_t n) {
  if (name == TRANSPOSED_A && n >= 4) memcpy(&d->transposed, value, 4);
  return 0;
}
API Enum cublasLtMatmulPreferenceCreate(void **to) { *to = calloc(1, 256); return 0; }
API Enum cublasLtMatmulPreferenceDestroy(void *p) { free(p); return 0; }
API Enum cublasLtMatmulPreferenceSetAttribute(void *p, Enum name,
                                                        const void *value, size_t n) {
  (void)p, (void)name, (void)value, (void)n;
  return 0;
}
API Enum cublasLtMatmulAlgoGetHeuristic(void *h, Product *d, Layout *a, Layout *b,
                                                  Layout *c, Layout *e, void *p, int n,
                                                  void *to, int *found) {
  (void)h, (void)d, (void)a, (void)b, (void)c, (void)e, (void)p;
  memset(to, 0, FOUND_BYTES);
  *found = n > 0;
  return 0;
}
API Enum cublasLtMatmul(void *h, Product *d, const void *alpha, const void *A, Layout *a,
                                  const void *B, Layout *b, const void *beta, const void *C, Layout *c, void *D,
                                  Layout *to, const void *algo, void *work, size_t bytes, void *s) {
  (void)h, (void)alpha, (void)A, (void)B, (void)b, (void)beta, (void)C, (void)c, (void)D, (void)algo, (void)work, (void)bytes, (void)s;
  if (hollow_fails(FAULT_PRODUCT)) return ALLOC_FAILED;
  if (hollow_fails(FAULT_BREAK)) return EXECUTION_FAILED;
  double k = d->transposed ? a->rows : a->cols;
  hollow_launched("product"), hollow_counts.products++;
  hollow_counts.flops += 2.0 * to->rows * to->cols * k * (to->batch ? to->batch : 1);
  return 0;
}
