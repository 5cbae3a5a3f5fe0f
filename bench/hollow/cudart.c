// A CUDA runtime and driver without a GPU: memory is the host's and untouched until something is copied into it, streams and
// events are in order at once, and a kernel that is launched is counted and does nothing. What a caller gets wrong is an error,
// as far as it can be known here: a pointer that was never allocated, memory beyond the GPU's size, a device that is not there.
//
// HOLLOW_NAME, HOLLOW_CAPABILITY (9.0), HOLLOW_GIB, HOLLOW_SMS, HOLLOW_SHARED_KIB, HOLLOW_COUNT say what GPU this is.
// The host reads back what it copied there, but values of up to HOLLOW_ZERO_BYTES (16), which kernels write as a rule: those are
// zero, and a single byte is 1 (yes). HOLLOW_COPY_MIB: larger copies are counted and not made (weights of large
// models). HOLLOW_REPORT: where a process that launched anything writes its counts at its end, as JSON; %d is its number. HOLLOW_US:
// what a launch costs the host, in microseconds (none).
//
// What goes wrong on a GPU, each as "n" or "n,count", from 1: HOLLOW_FAIL_AT, the n-th piece of memory that is asked for
// (cudaMalloc, cuMemCreate) can't be had; HOLLOW_FAIL_PINNED, of pinned memory; HOLLOW_FAIL_PRODUCT, cuBLAS has no memory for the
// n-th product; HOLLOW_FAIL_LAUNCH, CUDA has none for the n-th kernel. HOLLOW_BREAK="n,error": from the n-th kernel on every call
// ends in that error (700 illegal access, 719 launch failure, 214 ECC), as after a fault of the GPU or of a kernel. `hollow_fault`
// does the same from within a process, counted from there.
#define _GNU_SOURCE
#include "hollow.h"
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define PAGE ((size_t)2 << 20)

// ---- counts ----

API struct counts hollow_counts;
API void (*hollow_hears)(const char *what, const char *name, size_t size);  // a process that wants to know who asks sets it
static void hear(const char *what, const char *name, size_t size) { if (hollow_hears) hollow_hears(what, name, size); }
static void waited(const char *name) { __atomic_add_fetch(&hollow_counts.waits, 1, __ATOMIC_RELAXED), hear("wait", name, 0); }
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

typedef struct Kernel { const void *host; const char *name; uint64_t launches; struct Kernel *next; } Kernel;
enum { BUCKETS = 1 << 16 };
static Kernel *kernels[BUCKETS];

static double setting(const char *name, double otherwise) {
  const char *text = getenv(name);
  return text && *text ? atof(text) : otherwise;
}
// ---- what goes wrong ----

enum { MEMORY, PINNED, PRODUCT, LAUNCH, BREAK, FAULTS };
static struct { const char *name; long n, at, count; int known; } faults[FAULTS] = {
  {"HOLLOW_FAIL_AT"}, {"HOLLOW_FAIL_PINNED"}, {"HOLLOW_FAIL_PRODUCT"}, {"HOLLOW_FAIL_LAUNCH"}, {"HOLLOW_BREAK"},
};
static __thread cudaError_t last;
static cudaError_t fail(cudaError_t code) { return last = code; }
static cudaError_t broken;  // what every call ends in from now on
API void hollow_fault(int which, long at, long count) {
  faults[which].n = 0, faults[which].at = at, faults[which].count = count, faults[which].known = 1;
  if (which == BREAK) broken = 0;
}
API long hollow_asked(int which) { return faults[which].n; }
API int hollow_fails(int which) {
  if (!faults[which].known) {
    char *text = getenv(faults[which].name), *rest = NULL;
    long at = text ? strtol(text, &rest, 10) : 0;
    hollow_fault(which, at, rest && *rest == ',' ? atol(rest + 1) : which == BREAK ? cudaErrorLaunchFailure : 1);
  }
  long n = __atomic_add_fetch(&faults[which].n, 1, __ATOMIC_RELAXED), at = faults[which].at;
  if (which == BREAK) {
    if (at && n == at) broken = (cudaError_t)faults[which].count;
    return broken != 0;
  }
  return at && n >= at && n < at + faults[which].count;
}
#define WORKS if (broken) return fail(broken)
#define DRIVER_WORKS if (broken) return (CUresult)broken

static Kernel **bucket(const void *host) { return &kernels[((uintptr_t)host >> 4) % BUCKETS]; }
static void add_kernel(const void *host, const char *name) {
  Kernel *new = calloc(1, sizeof *new);
  new->host = host, new->name = name, new->next = *bucket(host);
  *bucket(host) = new;
}
static Kernel *find_kernel(const void *host) {
  Kernel *each = *bucket(host);
  while (each && each->host != host) each = each->next;
  return each;
}
static void launched(const void *host) {
  static double cost = -1;
  if (cost < 0) cost = setting("HOLLOW_US", 0) * 1e-6;
  __atomic_add_fetch(&hollow_counts.launches, 1, __ATOMIC_RELAXED);
  Kernel *kernel = find_kernel(host);
  if (kernel) __atomic_add_fetch(&kernel->launches, 1, __ATOMIC_RELAXED);
  hear("launch", kernel ? kernel->name : "", 0);
  if (cost > 0) {
    struct timespec now, end;
    clock_gettime(CLOCK_MONOTONIC, &end);
    do clock_gettime(CLOCK_MONOTONIC, &now);
    while ((now.tv_sec - end.tv_sec) + (now.tv_nsec - end.tv_nsec) * 1e-9 < cost);
  }
}
API void hollow_launched(const char *name) {  // what has no kernel of its own here, under a name that stays
  pthread_mutex_lock(&lock);
  if (!find_kernel(name)) add_kernel(name, name);
  pthread_mutex_unlock(&lock);
  launched(name);
}
static void not_made(const char *name) { fprintf(stderr, "hollow GPU: %s is not made here\n", name); }
API void hollow_not_made(const char *name) { not_made(name); }

API void hollow_write(const char *path) {
  FILE *file = fopen(path, "w");
  if (!file) return;
  struct counts *c = &hollow_counts;
  fprintf(file, "{\"launches\": %lu, \"waits\": %lu, \"copies_up\": %lu, \"copies_down\": %lu, \"bytes_up\": %lu,"
          " \"bytes_down\": %lu, \"waits_for_copies\": %lu, \"products\": %lu, \"allocations\": %lu, \"flops\": %.6e,\n\"kernels\": {",
          c->launches, c->waits, c->copies_up, c->copies_down, c->bytes_up, c->bytes_down, c->waits_for_copies, c->products,
          c->allocations, c->flops);
  const char *comma = "";
  for (int i = 0; i < BUCKETS; i++)
    for (Kernel *each = kernels[i]; each; each = each->next)
      if (each->launches) fprintf(file, "%s\n\"%s\": %lu", comma, each->name, each->launches), comma = ",";
  fprintf(file, "}}\n");
  fclose(file);
}
__attribute__((destructor)) static void report(void) {
  const char *path = getenv("HOLLOW_REPORT");
  char named[4096];
  if (!path || !*path || !hollow_counts.launches) return;
  snprintf(named, sizeof named, path, (int)getpid());
  hollow_write(named);
}
API void _exit(int code) {  // as Python's os._exit ends a process, without destructors
  report();
  syscall(SYS_exit_group, code);
  __builtin_unreachable();
}

// ---- memory ----

typedef struct Block { char *start; size_t size; int device, kind; struct Block *next; } Block;  // kind 1 device, 2 pinned
static Block *blocks;
enum { MOST = 64 };
static size_t used[MOST];
static __thread int current;

// CUDA_VISIBLE_DEVICES as CUDA reads it: numbers or UUIDs up to the first that is not there; not set: all
static int visible[MOST];
API int hollow_count(void) { return (int)setting("HOLLOW_COUNT", 1); }
static int count(void) {
  static int found = -1;
  if (found >= 0) return found;
  const char *each = getenv("CUDA_VISIBLE_DEVICES");
  int n = 0;
  if (!each) while (n < hollow_count()) visible[n] = n, n++;
  while (each && *each && n < MOST) {
    char *end = (char *)each;
    long number = strncmp(each, "GPU-", 4) ? strtol(each, &end, 10) : (long)(strtoul(each + 4, &end, 16) / 0x1010101) - 1;
    if (end == each || number < 0 || number >= hollow_count()) break;
    visible[n++] = (int)number;
    each = strchr(end, ',') ? strchr(end, ',') + 1 : NULL;
  }
  return found = n;
}
static size_t capacity(void) { return (size_t)(setting("HOLLOW_GIB", 79.1) * (1 << 30)); }
static const size_t CONTEXT = (size_t)520 << 20;  // what a context takes, as nvidia-smi shows on a Hopper GPU: rough
static Block *block_of(const void *pointer) {
  for (Block *each = blocks; each; each = each->next)
    if ((char *)pointer >= each->start && (char *)pointer < each->start + each->size) return each;
  return NULL;
}
static cudaError_t take(void **pointer, size_t size, int kind) {
  size_t whole = (size + PAGE - 1) / PAGE * PAGE;
  if (!size) { *pointer = NULL; return 0; }
  WORKS;
  if (hollow_fails(kind == 1 ? MEMORY : PINNED)) return fail(cudaErrorMemoryAllocation);
  pthread_mutex_lock(&lock);
  if (kind == 1 && used[current] + whole + CONTEXT > capacity()) {
    pthread_mutex_unlock(&lock);
    return fail(cudaErrorMemoryAllocation);
  }
  char *start = mmap(NULL, whole, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (start == MAP_FAILED) { pthread_mutex_unlock(&lock); return fail(cudaErrorMemoryAllocation); }
  Block *new = malloc(sizeof *new);
  *new = (Block){start, whole, current, kind, blocks};
  blocks = new;
  if (kind == 1) used[current] += whole;
  hollow_counts.allocations++;
  pthread_mutex_unlock(&lock);
  *pointer = start;
  return 0;
}
static cudaError_t give(void *pointer) {
  if (!pointer) return 0;
  pthread_mutex_lock(&lock);
  for (Block **at = &blocks; *at; at = &(*at)->next)
    if ((*at)->start == pointer) {
      Block *old = *at;
      *at = old->next;
      if (old->kind == 1) used[old->device] -= old->size;
      munmap(old->start, old->size);
      free(old);
      pthread_mutex_unlock(&lock);
      return 0;
    }
  pthread_mutex_unlock(&lock);
  return fail(cudaErrorInvalidValue);
}
API cudaError_t cudaMalloc(void **pointer, size_t size) { return take(pointer, size, 1); }
API cudaError_t cudaMallocAsync(void **pointer, size_t size, cudaStream_t s) { (void)s; return take(pointer, size, 1); }
API cudaError_t cudaFree(void *pointer) { return give(pointer); }
API cudaError_t cudaFreeAsync(void *pointer, cudaStream_t s) { (void)s; return give(pointer); }
API cudaError_t cudaHostAlloc(void **pointer, size_t size, unsigned flags) { (void)flags; return take(pointer, size, 2); }
API cudaError_t cudaMallocHost(void **pointer, size_t size) { return take(pointer, size, 2); }
API cudaError_t cudaFreeHost(void *pointer) { return give(pointer); }
API cudaError_t cudaMallocManaged(void **pointer, size_t size, unsigned flags) { (void)flags; return take(pointer, size, 2); }
API cudaError_t cudaHostRegister(void *pointer, size_t size, unsigned flags) {
  (void)flags;
  Block *new = malloc(sizeof *new);
  pthread_mutex_lock(&lock);
  *new = (Block){pointer, size, current, 2, blocks};
  blocks = new;
  pthread_mutex_unlock(&lock);
  return 0;
}
API cudaError_t cudaHostUnregister(void *pointer) {
  pthread_mutex_lock(&lock);
  for (Block **at = &blocks; *at; at = &(*at)->next)
    if ((*at)->start == pointer) { Block *old = *at; *at = old->next; free(old); break; }
  pthread_mutex_unlock(&lock);
  return 0;
}
API cudaError_t cudaMemGetInfo(size_t *unused, size_t *total) {
  WORKS;
  *total = capacity();
  *unused = *total - CONTEXT - used[current];
  return 0;
}
API void hollow_memory(int number, size_t *taken, size_t *total) {  // by the number on the machine; what others take is not seen
  *taken = 0, *total = capacity();
  for (int i = 0; i < count(); i++) if (visible[i] == number) *taken = used[i] + CONTEXT;
}
API int hollow_is_there(const void *pointer, size_t size) {  // on the device that is current
  pthread_mutex_lock(&lock);
  Block *block = block_of(pointer);
  int is_there = block && block->kind == 1 && block->device == current && (char *)pointer + size <= block->start + block->size;
  pthread_mutex_unlock(&lock);
  return is_there;
}
API cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *to, const void *pointer) {
  memset(to, 0, sizeof *to);
  pthread_mutex_lock(&lock);
  Block *block = block_of(pointer);
  to->type = !block ? cudaMemoryTypeUnregistered : block->kind == 1 ? cudaMemoryTypeDevice : cudaMemoryTypeHost;
  to->device = block ? block->device : -2;
  pthread_mutex_unlock(&lock);
  if (block) to->hostPointer = to->devicePointer = (void *)pointer;
  return 0;
}
static cudaError_t copy(void *to, const void *from, size_t size, enum cudaMemcpyKind kind, int waits) {
  if (!size) return 0;
  WORKS;
  pthread_mutex_lock(&lock);
  Block *target = block_of(to), *source = block_of(from);
  int up = target && target->kind == 1, down = source && source->kind == 1;
  int pinned = (!up && target && target->kind == 2) || (!down && source && source->kind == 2);
  pthread_mutex_unlock(&lock);
  if ((kind == cudaMemcpyHostToDevice && !up) || (kind == cudaMemcpyDeviceToHost && !down)) return fail(cudaErrorInvalidValue);
  int stays = waits || (up != down && !pinned && (down || size > 65536));
  if (up && !down) hollow_counts.copies_up++, hollow_counts.bytes_up += size;
  if (down && !up) hollow_counts.copies_down++, hollow_counts.bytes_down += size;
  if (stays) hollow_counts.waits_for_copies++;
  hear(stays ? "copy waited for" : "copy", up && down ? "within" : up ? "up" : down ? "down" : "host", size);
  if (size > (size_t)(setting("HOLLOW_COPY_MIB", 1e9) * (1 << 20))) return 0;
  if (down && !up && size <= (size_t)setting("HOLLOW_ZERO_BYTES", 16))
    memset(to, size == 1, size);  // what kernels would have written: zero, and yes
  else memmove(to, from, size);
  return 0;
}
API cudaError_t cudaMemcpy(void *to, const void *from, size_t size, enum cudaMemcpyKind kind) { return copy(to, from, size, kind, 1); }
API cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t size, enum cudaMemcpyKind kind, cudaStream_t s) {
  (void)s;
  return copy(to, from, size, kind, 0);
}
API cudaError_t cudaMemcpyPeerAsync(void *to, int a, const void *from, int b, size_t size, cudaStream_t s) {
  (void)a, (void)b, (void)s;
  return copy(to, from, size, cudaMemcpyDeviceToDevice, 0);
}
API cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t pitch, size_t width, size_t height,
                                  enum cudaMemcpyKind kind, cudaStream_t s) {
  (void)s;
  for (size_t row = 0; row < height; row++)
    copy((char *)to + row * to_pitch, (const char *)from + row * pitch, width, kind, 0);
  return 0;
}
API cudaError_t cudaMemcpyToSymbol(const void *symbol, const void *from, size_t size, size_t offset, enum cudaMemcpyKind kind) {
  (void)symbol, (void)from, (void)size, (void)offset, (void)kind;
  return 0;
}
API cudaError_t cudaGetSymbolAddress(void **pointer, const void *symbol) { (void)symbol; return take(pointer, 4096, 1); }
API cudaError_t cudaMemset(void *to, int value, size_t size) {
  WORKS;
  if (size <= (size_t)(setting("HOLLOW_COPY_MIB", 1e9) * (1 << 20))) memset(to, value, size);
  return 0;
}
API cudaError_t cudaMemsetAsync(void *to, int value, size_t size, cudaStream_t s) {
  (void)s;
  hollow_launched("memset");
  return cudaMemset(to, value, size);
}

API cudaError_t cudaMemPrefetchAsync(const void *pointer, size_t size, struct cudaMemLocation to, unsigned f, cudaStream_t s) {
  (void)pointer, (void)size, (void)to, (void)f, (void)s;
  return 0;
}

// ---- devices ----

static int capability(int minor) {
  double both = setting("HOLLOW_CAPABILITY", 9.0);
  int tenths = (int)(both * 10 + 0.5);
  return minor ? tenths % 10 : tenths / 10;
}
static const char *name_of(void) { const char *name = getenv("HOLLOW_NAME"); return name && *name ? name : "NVIDIA H100 80GB HBM3"; }

API cudaError_t cudaGetDeviceCount(int *n) { *n = count(); return count() ? 0 : fail(cudaErrorNoDevice); }
API cudaError_t cudaGetDevice(int *device) { *device = current; return 0; }
API cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= count()) return fail(cudaErrorInvalidDevice);
  current = device;
  return 0;
}
API cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr name, int device) {
  (void)device;
  switch ((int)name) {
    case cudaDevAttrMaxThreadsPerBlock: *value = 1024; break;
    case cudaDevAttrMaxBlockDimX: case cudaDevAttrMaxBlockDimY: *value = 1024; break;
    case cudaDevAttrMaxBlockDimZ: *value = 64; break;
    case cudaDevAttrMaxGridDimX: *value = 2147483647; break;
    case cudaDevAttrMaxGridDimY: case cudaDevAttrMaxGridDimZ: *value = 65535; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = 49152; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = (int)setting("HOLLOW_SHARED_KIB", 227) * 1024; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = (int)(setting("HOLLOW_SHARED_KIB", 227) + 1) * 1024; break;
    case cudaDevAttrReservedSharedMemoryPerBlock: *value = 1024; break;
    case cudaDevAttrWarpSize: *value = 32; break;
    case cudaDevAttrMultiProcessorCount: *value = (int)setting("HOLLOW_SMS", 132); break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = 2048; break;
    case cudaDevAttrMaxRegistersPerBlock: case cudaDevAttrMaxRegistersPerMultiprocessor: *value = 65536; break;
    case cudaDevAttrComputeCapabilityMajor: *value = capability(0); break;
    case cudaDevAttrComputeCapabilityMinor: *value = capability(1); break;
    case cudaDevAttrL2CacheSize: *value = 50 << 20; break;
    case cudaDevAttrClockRate: *value = 1980000; break;
    case cudaDevAttrMemoryClockRate: *value = 2619000; break;
    case cudaDevAttrGlobalMemoryBusWidth: *value = 5120; break;
    case cudaDevAttrUnifiedAddressing: case cudaDevAttrConcurrentKernels: case cudaDevAttrCooperativeLaunch: *value = 1; break;
    case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED: *value = 1; break;
    default: *value = 0;
  }
  return 0;
}
API cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *to, int device) {
  if (device < 0 || device >= count()) return fail(cudaErrorInvalidDevice);
  memset(to, 0, sizeof *to);
  snprintf(to->name, sizeof to->name, "%s", name_of());
  memset(to->uuid.bytes, visible[device] + 1, sizeof to->uuid.bytes);
  int value;
#define ASK(field, attribute) cudaDeviceGetAttribute(&value, attribute, device), to->field = value
  to->totalGlobalMem = capacity();
  ASK(sharedMemPerBlock, cudaDevAttrMaxSharedMemoryPerBlock);
  ASK(sharedMemPerBlockOptin, cudaDevAttrMaxSharedMemoryPerBlockOptin);
  ASK(sharedMemPerMultiprocessor, cudaDevAttrMaxSharedMemoryPerMultiprocessor);
  ASK(reservedSharedMemPerBlock, cudaDevAttrReservedSharedMemoryPerBlock);
  ASK(regsPerBlock, cudaDevAttrMaxRegistersPerBlock);
  ASK(regsPerMultiprocessor, cudaDevAttrMaxRegistersPerMultiprocessor);
  ASK(warpSize, cudaDevAttrWarpSize);
  ASK(maxThreadsPerBlock, cudaDevAttrMaxThreadsPerBlock);
  ASK(maxThreadsPerMultiProcessor, cudaDevAttrMaxThreadsPerMultiProcessor);
  ASK(multiProcessorCount, cudaDevAttrMultiProcessorCount);
  ASK(major, cudaDevAttrComputeCapabilityMajor);
  ASK(minor, cudaDevAttrComputeCapabilityMinor);
  ASK(l2CacheSize, cudaDevAttrL2CacheSize);
  ASK(memoryBusWidth, cudaDevAttrGlobalMemoryBusWidth);
  to->maxThreadsDim[0] = to->maxThreadsDim[1] = 1024, to->maxThreadsDim[2] = 64;
  to->maxGridSize[0] = 2147483647, to->maxGridSize[1] = to->maxGridSize[2] = 65535;
  to->maxBlocksPerMultiProcessor = 32, to->totalConstMem = 65536, to->memPitch = 2147483647, to->textureAlignment = 512;
  to->unifiedAddressing = to->concurrentKernels = to->canMapHostMemory = to->cooperativeLaunch = to->asyncEngineCount = 1;
  to->pciBusID = visible[device] + 1;
  return 0;
}
API cudaError_t cudaDeviceGetPCIBusId(char *to, int size, int device) { snprintf(to, size, "0000:%02x:00.0", visible[device] + 1); return 0; }
API cudaError_t cudaDeviceCanAccessPeer(int *can, int a, int b) { *can = a != b; return 0; }
API cudaError_t cudaDeviceEnablePeerAccess(int a, unsigned b) { (void)a, (void)b; return 0; }
API cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { *least = 0, *greatest = -5; return 0; }
API cudaError_t cudaDeviceSynchronize(void) { WORKS; waited("device"); return 0; }
API cudaError_t cudaDeviceReset(void) { return 0; }
API cudaError_t cudaDriverGetVersion(int *version) { *version = 13000; return 0; }
API cudaError_t cudaRuntimeGetVersion(int *version) { *version = 13000; return 0; }
API cudaError_t cudaGetLastError(void) { cudaError_t was = broken ? broken : last; last = 0; return was; }
API cudaError_t cudaPeekAtLastError(void) { return broken ? broken : last; }
API const char *cudaGetErrorName(cudaError_t e) {
  return e == 0 ? "cudaSuccess" : e == cudaErrorMemoryAllocation ? "cudaErrorMemoryAllocation" : "cudaErrorHollow";
}
API const char *cudaGetErrorString(cudaError_t e) {
  return e == 0 ? "no error" : e == cudaErrorMemoryAllocation ? "out of memory" : e == cudaErrorInvalidValue ? "invalid argument" :
    e == cudaErrorIllegalAddress ? "an illegal memory access was encountered" : e == cudaErrorLaunchFailure ? "unspecified launch failure" :
    e == cudaErrorECCUncorrectable ? "uncorrectable ECC error encountered" : e == cudaErrorAssert ? "device-side assert triggered" :
    e == cudaErrorInvalidDevice ? "invalid device ordinal" : e == cudaErrorNoDevice ? "no CUDA-capable device is detected" : "hollow";
}
API cudaError_t cudaProfilerStart(void) { return 0; }
API cudaError_t cudaProfilerStop(void) { return 0; }

// ---- streams, events, graphs ----

static uintptr_t next_handle = 0x1000;
static void *handle(void) { return (void *)__atomic_add_fetch(&next_handle, 16, __ATOMIC_RELAXED); }
typedef struct { struct timespec when; int recorded; } Event;
static __thread int capturing;
static unsigned long long capture_id;

API cudaError_t cudaStreamCreate(cudaStream_t *s) { WORKS; *s = handle(); return 0; }
API cudaError_t cudaStreamCreateWithFlags(cudaStream_t *s, unsigned f) { WORKS; (void)f; *s = handle(); return 0; }
API cudaError_t cudaStreamCreateWithPriority(cudaStream_t *s, unsigned f, int p) { WORKS; (void)f, (void)p; *s = handle(); return 0; }
API cudaError_t cudaStreamDestroy(cudaStream_t s) { (void)s; return 0; }
API cudaError_t cudaStreamGetPriority(cudaStream_t s, int *p) { (void)s; *p = 0; return 0; }
API cudaError_t cudaStreamQuery(cudaStream_t s) { WORKS; (void)s; return 0; }
API cudaError_t cudaStreamSynchronize(cudaStream_t s) { WORKS; (void)s; waited("stream"); return capturing ? fail(cudaErrorStreamCaptureUnsupported) : 0; }
API cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned f) { WORKS; (void)s, (void)e, (void)f; return 0; }
API cudaError_t cudaStreamAddCallback(cudaStream_t s, cudaStreamCallback_t call, void *data, unsigned f) { (void)f; call(s, 0, data); return 0; }
API cudaError_t cudaLaunchHostFunc(cudaStream_t s, cudaHostFn_t call, void *data) { (void)s; call(data); return 0; }
API cudaError_t cudaEventCreateWithFlags(cudaEvent_t *e, unsigned f) { (void)f; *e = calloc(1, sizeof(Event)); return 0; }
API cudaError_t cudaEventCreate(cudaEvent_t *e) { return cudaEventCreateWithFlags(e, 0); }
API cudaError_t cudaEventDestroy(cudaEvent_t e) { free(e); return 0; }
API cudaError_t cudaEventQuery(cudaEvent_t e) { WORKS; (void)e; return 0; }
API cudaError_t cudaEventSynchronize(cudaEvent_t e) { WORKS; (void)e; waited("event"); return 0; }
API cudaError_t cudaEventRecordWithFlags(cudaEvent_t e, cudaStream_t s, unsigned f) {
  WORKS;
  (void)s, (void)f;
  clock_gettime(CLOCK_MONOTONIC, &((Event *)e)->when);
  ((Event *)e)->recorded = 1;
  return 0;
}
API cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s) { return cudaEventRecordWithFlags(e, s, 0); }
API cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t a, cudaEvent_t b) {
  Event *from = (Event *)a, *to = (Event *)b;
  WORKS;
  if (!from->recorded || !to->recorded) return fail(cudaErrorInvalidResourceHandle);
  *ms = (float)((to->when.tv_sec - from->when.tv_sec) * 1e3 + (to->when.tv_nsec - from->when.tv_nsec) * 1e-6);
  return 0;
}
API cudaError_t cudaStreamBeginCapture(cudaStream_t s, enum cudaStreamCaptureMode m) { (void)s, (void)m; capturing = 1, capture_id++; return 0; }
API cudaError_t cudaStreamBeginCaptureToGraph(cudaStream_t s, cudaGraph_t g, const cudaGraphNode_t *d, const cudaGraphEdgeData *e,
                                              size_t n, enum cudaStreamCaptureMode m) {
  (void)g, (void)d, (void)e, (void)n;
  return cudaStreamBeginCapture(s, m);
}
API cudaError_t cudaStreamEndCapture(cudaStream_t s, cudaGraph_t *g) { (void)s; capturing = 0; *g = handle(); return 0; }
API cudaError_t cudaStreamIsCapturing(cudaStream_t s, enum cudaStreamCaptureStatus *to) {
  (void)s;
  *to = capturing ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return 0;
}
API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t s, enum cudaStreamCaptureStatus *status, unsigned long long *id, cudaGraph_t *graph,
                                         const cudaGraphNode_t **nodes, const cudaGraphEdgeData **edges, size_t *n) {
  cudaStreamIsCapturing(s, status);
  if (id) *id = capture_id;
  if (graph) *graph = (cudaGraph_t)0x10;
  if (nodes) *nodes = NULL;
  if (edges) *edges = NULL;
  if (n) *n = 0;
  return 0;
}
API cudaError_t cudaStreamUpdateCaptureDependencies(cudaStream_t s, cudaGraphNode_t *d, const cudaGraphEdgeData *e, size_t n, unsigned f) {
  (void)s, (void)d, (void)e, (void)n, (void)f;
  return 0;
}
API cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) { *mode = cudaStreamCaptureModeGlobal; return 0; }
API cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *to, cudaGraph_t g, unsigned long long f) { (void)g, (void)f; *to = handle(); return 0; }
API cudaError_t cudaGraphInstantiate(cudaGraphExec_t *to, cudaGraph_t g, unsigned long long f) { return cudaGraphInstantiateWithFlags(to, g, f); }
API cudaError_t cudaGraphLaunch(cudaGraphExec_t g, cudaStream_t s) { (void)g, (void)s; hollow_counts.launches++; return 0; }
API cudaError_t cudaGraphDestroy(cudaGraph_t g) { (void)g; return 0; }
API cudaError_t cudaGraphExecDestroy(cudaGraphExec_t g) { (void)g; return 0; }
API cudaError_t cudaGraphGetNodes(cudaGraph_t g, cudaGraphNode_t *nodes, size_t *n) { (void)g, (void)nodes; *n = 1; return 0; }
API cudaError_t cudaGraphDebugDotPrint(cudaGraph_t g, const char *path, unsigned f) { (void)g, (void)path, (void)f; return 0; }

// ---- kernels ----

API void **__cudaRegisterFatBinary(void *binary) { return (void **)binary; }
API void __cudaRegisterFatBinaryEnd(void **binary) { (void)binary; }
API void __cudaUnregisterFatBinary(void **binary) { (void)binary; }
API char __cudaInitModule(void **binary) { (void)binary; return 1; }
API void __cudaRegisterFunction(void **binary, const char *host, char *device, const char *name, int limit, void *a, void *b, void *c,
                                void *d, int *e) {
  (void)binary, (void)device, (void)limit, (void)a, (void)b, (void)c, (void)d, (void)e;
  add_kernel(host, name);
}
API void __cudaRegisterVar(void **binary, char *host, char *device, const char *name, int ext, size_t size, int constant, int global) {
  (void)binary, (void)host, (void)device, (void)name, (void)ext, (void)size, (void)constant, (void)global;
}
static __thread struct { dim3 grid, block; size_t shared; void *stream; } pushed;
API unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void *stream) {
  pushed.grid = grid, pushed.block = block, pushed.shared = shared, pushed.stream = stream;
  return 0;
}
API cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
  *grid = pushed.grid, *block = pushed.block, *shared = pushed.shared, *(void **)stream = pushed.stream;
  return 0;
}
static cudaError_t launch(const void *kernel, dim3 grid, dim3 block) {
  if (!grid.x || !grid.y || !grid.z || !block.x || !block.y || !block.z || grid.y > 65535 || grid.z > 65535 ||
      (uint64_t)block.x * block.y * block.z > 1024)
    return fail(cudaErrorInvalidConfiguration);
  WORKS;
  if (hollow_fails(LAUNCH)) return fail(cudaErrorMemoryAllocation);
  hollow_fails(BREAK);  // the launch itself is well: the next call is told
  launched(kernel);
  return 0;
}
API cudaError_t __cudaGetKernel(cudaKernel_t *to, const void *host) { *to = (cudaKernel_t)host; return 0; }
API cudaError_t __cudaLaunchKernel(cudaKernel_t k, dim3 grid, dim3 block, void **args, size_t shared, cudaStream_t s) {
  (void)args, (void)shared, (void)s;
  return launch(k, grid, block);
}
API cudaError_t cudaLaunchKernel(const void *k, dim3 grid, dim3 block, void **args, size_t shared, cudaStream_t s) {
  (void)args, (void)shared, (void)s;
  return launch(k, grid, block);
}
API cudaError_t cudaLaunchCooperativeKernel(const void *k, dim3 grid, dim3 block, void **args, size_t shared, cudaStream_t s) {
  return cudaLaunchKernel(k, grid, block, args, shared, s);
}
API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *c, const void *k, void **args) {
  return cudaLaunchKernel(k, c->gridDim, c->blockDim, args, c->dynamicSmemBytes, c->stream);
}
API cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *to, const void *f) {
  (void)f;
  memset(to, 0, sizeof *to);
  static const int built_for[] = {75, 80, 86, 90, 100, 120};  // torch's wheels for CUDA 13: an RTX 4090 runs what is for 86
  int own = capability(0) * 10 + capability(1);
  to->maxThreadsPerBlock = 1024, to->numRegs = 64, to->ptxVersion = to->binaryVersion = own;
  for (size_t i = 0; i < sizeof built_for / sizeof *built_for; i++)
    if (built_for[i] <= own) to->ptxVersion = to->binaryVersion = built_for[i];
  to->maxDynamicSharedSizeBytes = 49152;
  return 0;
}
API cudaError_t cudaFuncSetAttribute(const void *f, enum cudaFuncAttribute name, int value) {
  (void)f;
  int most = (int)setting("HOLLOW_SHARED_KIB", 227) * 1024;
  return name == cudaFuncAttributeMaxDynamicSharedMemorySize && value > most ? fail(cudaErrorInvalidValue) : 0;
}
API cudaError_t cudaKernelSetAttributeForDevice(cudaKernel_t k, enum cudaFuncAttribute name, int value, int device) {
  (void)device;
  return cudaFuncSetAttribute(k, name, value);
}
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *n, const void *f, int block, size_t shared, unsigned g) {
  (void)f, (void)shared, (void)g;
  *n = block > 1024 ? 0 : 2048 / (block ? block : 1) > 2 ? 2 : 1;
  return 0;
}
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *n, const void *f, int block, size_t shared) {
  return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(n, f, block, shared, 0);
}

// ---- the driver: what torch's growing segments, Triton and compiled code ask for ----

API cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **to, unsigned version, unsigned long long flags,
                                                 enum cudaDriverEntryPointQueryResult *found) {
  (void)version, (void)flags;
  char versioned[256];
  snprintf(versioned, sizeof versioned, "%s_v2", name);
  *to = dlsym(RTLD_DEFAULT, versioned);
  if (!*to) *to = dlsym(RTLD_DEFAULT, name);
  if (found) *found = *to ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  if (!*to) not_made(name);
  return 0;
}
API cudaError_t cudaGetDriverEntryPoint(const char *name, void **to, unsigned long long flags, enum cudaDriverEntryPointQueryResult *found) {
  return cudaGetDriverEntryPointByVersion(name, to, 13000, flags, found);
}
API CUresult cuInit(unsigned f) { (void)f; return 0; }
API CUresult cuDriverGetVersion(int *v) { *v = 13000; return 0; }
API CUresult cuGetErrorString(CUresult e, const char **to) { *to = cudaGetErrorString((cudaError_t)e); return 0; }
API CUresult cuGetErrorName(CUresult e, const char **to) { (void)e; *to = "CUDA_ERROR_HOLLOW"; return 0; }
API CUresult cuDeviceGetCount(int *n) { *n = count(); return 0; }
API CUresult cuDeviceGet(CUdevice *to, int device) { *to = device; return device < count() ? 0 : 101; }
API CUresult cuDeviceGetName(char *to, int size, CUdevice d) { (void)d; snprintf(to, size, "%s", name_of()); return 0; }
API CUresult cuDeviceTotalMem_v2(size_t *to, CUdevice d) { (void)d; *to = capacity(); return 0; }
API CUresult cuDeviceGetAttribute(int *to, CUdevice_attribute name, CUdevice d) { return (CUresult)cudaDeviceGetAttribute(to, (enum cudaDeviceAttr)name, d); }
API CUresult cuDevicePrimaryCtxRetain(CUcontext *to, CUdevice d) { *to = (CUcontext)(uintptr_t)(d + 1); return 0; }
API CUresult cuDevicePrimaryCtxGetState(CUdevice d, unsigned *f, int *active) { (void)d; if (f) *f = 0; *active = 1; return 0; }
API CUresult cuCtxGetCurrent(CUcontext *to) { *to = (CUcontext)(uintptr_t)(current + 1); return 0; }
API CUresult cuCtxSetCurrent(CUcontext c) { current = c ? (int)(uintptr_t)c - 1 : 0; return 0; }
API CUresult cuCtxGetDevice(CUdevice *to) { *to = current; return 0; }
API CUresult cuCtxPushCurrent_v2(CUcontext c) { return cuCtxSetCurrent(c); }
API CUresult cuCtxPopCurrent_v2(CUcontext *c) { return cuCtxGetCurrent(c); }
API CUresult cuCtxSetLimit(CUlimit l, size_t v) { (void)l, (void)v; return 0; }
API CUresult cuCtxGetLimit(size_t *v, CUlimit l) { (void)l; *v = 0; return 0; }
API CUresult cuStreamSynchronize(CUstream s) { return (CUresult)cudaStreamSynchronize(s); }
API CUresult cuPointerGetAttribute(void *to, CUpointer_attribute name, CUdeviceptr pointer) {
  pthread_mutex_lock(&lock);
  Block *block = block_of((void *)pointer);
  pthread_mutex_unlock(&lock);
  if (!block) return CUDA_ERROR_INVALID_VALUE;
  if (name == CU_POINTER_ATTRIBUTE_DEVICE_POINTER) *(CUdeviceptr *)to = pointer;
  else if (name == CU_POINTER_ATTRIBUTE_MEMORY_TYPE) *(unsigned *)to = block->kind == 1 ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST;
  else if (name == CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL) *(int *)to = block->device;
  else if (name == CU_POINTER_ATTRIBUTE_RANGE_START_ADDR) *(CUdeviceptr *)to = (CUdeviceptr)block->start;
  else return CUDA_ERROR_INVALID_VALUE;
  return 0;
}
API CUresult cuPointerGetAttributes(unsigned n, CUpointer_attribute *names, void **to, CUdeviceptr pointer) {
  for (unsigned i = 0; i < n; i++) cuPointerGetAttribute(to[i], names[i], pointer);
  return 0;
}
API CUresult cuMemGetAddressRange_v2(CUdeviceptr *start, size_t *size, CUdeviceptr pointer) {
  pthread_mutex_lock(&lock);
  Block *block = block_of((void *)pointer);
  pthread_mutex_unlock(&lock);
  if (!block) return CUDA_ERROR_NOT_FOUND;
  if (start) *start = (CUdeviceptr)block->start;
  if (size) *size = block->size;
  return 0;
}
// a module is its image; a function its name, kept for the counts
API CUresult cuModuleLoadData(CUmodule *to, const void *image) { (void)image; *to = handle(); return 0; }
API CUresult cuModuleLoadDataEx(CUmodule *to, const void *image, unsigned n, CUjit_option *o, void **v) { (void)n, (void)o, (void)v; return cuModuleLoadData(to, image); }
API CUresult cuModuleLoad(CUmodule *to, const char *path) { return access(path, R_OK) ? CUDA_ERROR_FILE_NOT_FOUND : cuModuleLoadData(to, path); }
API CUresult cuModuleUnload(CUmodule m) { (void)m; return 0; }
API CUresult cuModuleGetFunction(CUfunction *to, CUmodule m, const char *name) {
  (void)m;
  *to = handle();
  pthread_mutex_lock(&lock);
  add_kernel(*to, strdup(name));
  pthread_mutex_unlock(&lock);
  return 0;
}
API CUresult cuFuncGetAttribute(int *to, CUfunction_attribute name, CUfunction f) {
  (void)f;
  *to = name == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : name == CU_FUNC_ATTRIBUTE_NUM_REGS ? 64 : 0;
  return 0;
}
API CUresult cuFuncSetAttribute(CUfunction f, CUfunction_attribute name, int value) {
  int most = (int)setting("HOLLOW_SHARED_KIB", 227) * 1024;
  (void)f;
  return name == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES && value > most ? CUDA_ERROR_INVALID_VALUE : 0;
}
API CUresult cuFuncSetCacheConfig(CUfunction f, CUfunc_cache c) { (void)f, (void)c; return 0; }
API CUresult cuLaunchKernel(CUfunction f, unsigned a, unsigned b, unsigned c, unsigned x, unsigned y, unsigned z, unsigned shared, CUstream s,
                            void **args, void **extra) {
  (void)shared, (void)s, (void)args, (void)extra;
  if (b > 65535 || c > 65535 || !x || x * y * z > 1024 || shared > (unsigned)setting("HOLLOW_SHARED_KIB", 227) * 1024) return CUDA_ERROR_INVALID_VALUE;
  DRIVER_WORKS;
  if (hollow_fails(LAUNCH)) return CUDA_ERROR_OUT_OF_MEMORY;
  hollow_fails(BREAK);
  if (a && b && c) launched(f);
  return 0;
}
API CUresult cuLaunchKernelEx(const CUlaunchConfig *k, CUfunction f, void **args, void **extra) {
  return cuLaunchKernel(f, k->gridDimX, k->gridDimY, k->gridDimZ, k->blockDimX, k->blockDimY, k->blockDimZ, k->sharedMemBytes, k->hStream, args, extra);
}
API CUresult cuLaunchCooperativeKernel(CUfunction f, unsigned a, unsigned b, unsigned c, unsigned x, unsigned y, unsigned z, unsigned shared,
                                       CUstream s, void **args) {
  return cuLaunchKernel(f, a, b, c, x, y, z, shared, s, args, NULL);
}
API CUresult cuOccupancyMaxActiveClusters(int *n, CUfunction f, const CUlaunchConfig *k) { (void)f, (void)k; *n = 1; return 0; }
API CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *n, CUfunction f, int block, size_t shared) { (void)f, (void)shared; *n = block > 1024 ? 0 : 2; return 0; }
API CUresult cuTensorMapEncodeTiled(CUtensorMap *m, CUtensorMapDataType t, cuuint32_t r, void *p, const cuuint64_t *d, const cuuint64_t *s,
                                    const cuuint32_t *b, const cuuint32_t *e, CUtensorMapInterleave i, CUtensorMapSwizzle w,
                                    CUtensorMapL2promotion l, CUtensorMapFloatOOBfill o) {
  (void)t, (void)r, (void)p, (void)d, (void)s, (void)b, (void)e, (void)i, (void)w, (void)l, (void)o;
  memset(m, 0, sizeof *m);
  return 0;
}
// segments that grow: addresses are reserved, and pages are put there
API CUresult cuMemGetAllocationGranularity(size_t *to, const CUmemAllocationProp *p, CUmemAllocationGranularity_flags f) { (void)p, (void)f; *to = PAGE; return 0; }
API CUresult cuMemAddressReserve(CUdeviceptr *to, size_t size, size_t align, CUdeviceptr at, unsigned long long f) {
  (void)align, (void)at, (void)f;
  void *start = mmap(NULL, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (start == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  Block *new = malloc(sizeof *new);
  pthread_mutex_lock(&lock);
  *new = (Block){start, size, current, 1, blocks};
  blocks = new;
  pthread_mutex_unlock(&lock);
  *to = (CUdeviceptr)start;
  return 0;
}
API CUresult cuMemAddressFree(CUdeviceptr at, size_t size) {
  cudaHostUnregister((void *)at);
  munmap((void *)at, size);
  return 0;
}
typedef struct { size_t size; int device; } Pages;
API CUresult cuMemCreate(CUmemGenericAllocationHandle *to, size_t size, const CUmemAllocationProp *p, unsigned long long f) {
  (void)f;
  int device = p->location.id;
  DRIVER_WORKS;
  if (hollow_fails(MEMORY)) return CUDA_ERROR_OUT_OF_MEMORY;
  pthread_mutex_lock(&lock);
  int full = used[device] + size + CONTEXT > capacity();
  if (!full) used[device] += size, hollow_counts.allocations++;
  pthread_mutex_unlock(&lock);
  if (full) return CUDA_ERROR_OUT_OF_MEMORY;
  Pages *new = malloc(sizeof *new);
  *new = (Pages){size, device};
  *to = (CUmemGenericAllocationHandle)new;
  return 0;
}
API CUresult cuMemRelease(CUmemGenericAllocationHandle h) {
  Pages *old = (Pages *)h;
  pthread_mutex_lock(&lock);
  used[old->device] -= old->size;
  pthread_mutex_unlock(&lock);
  free(old);
  return 0;
}
API CUresult cuMemMap(CUdeviceptr at, size_t size, size_t offset, CUmemGenericAllocationHandle h, unsigned long long f) {
  DRIVER_WORKS;
  (void)offset, (void)h, (void)f;
  return mprotect((void *)at, size, PROT_READ | PROT_WRITE) ? CUDA_ERROR_INVALID_VALUE : 0;
}
API CUresult cuMemUnmap(CUdeviceptr at, size_t size) {
  DRIVER_WORKS;
  void *start = mmap((void *)at, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  return start == MAP_FAILED ? CUDA_ERROR_INVALID_VALUE : 0;
}
API CUresult cuMemSetAccess(CUdeviceptr at, size_t size, const CUmemAccessDesc *d, size_t n) { (void)at, (void)size, (void)d, (void)n; return 0; }
