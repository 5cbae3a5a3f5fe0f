// What nvidia-smi's library says of the hollow GPU: names, numbers, memory; it is never busy.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define API __attribute__((visibility("default")))
typedef int Enum;
enum { NOT_SUPPORTED = 3, NOT_FOUND = 6 };
extern int hollow_count(void), cuDeviceGetName(char *, int, int);
extern void hollow_memory(int device, size_t *used, size_t *total);

API Enum nvmlInit_v2(void) { return 0; }
API Enum nvmlInitWithFlags(unsigned f) { return 0; }
API Enum nvmlShutdown(void) { return 0; }
API const char *nvmlErrorString(Enum e) { return e ? "Not Supported" : "Success"; }
API Enum nvmlSystemGetDriverVersion(char *to, unsigned n) { snprintf(to, n, "580.00.hollow"); return 0; }
API Enum nvmlSystemGetCudaDriverVersion_v2(int *to) { *to = 13000; return 0; }
API Enum nvmlSystemGetCudaDriverVersion(int *to) { *to = 13000; return 0; }
API Enum nvmlDeviceGetCount_v2(unsigned *n) { *n = (unsigned)hollow_count(); return 0; }
API Enum nvmlDeviceGetHandleByIndex_v2(unsigned i, void **to) {
  unsigned n;
  nvmlDeviceGetCount_v2(&n);
  *to = (void *)(uintptr_t)(i + 1);
  return i < n ? 0 : NOT_FOUND;
}
API Enum nvmlDeviceGetHandleByPciBusId_v2(const char *id, void **to) { return nvmlDeviceGetHandleByIndex_v2((unsigned)strtoul(strchr(id, ':') + 1, NULL, 16) - 1, to); }
API Enum nvmlDeviceGetHandleByUUID(const char *id, void **to) { return nvmlDeviceGetHandleByIndex_v2((unsigned)strtoul(id + 4, NULL, 16) / 0x1010101 - 1, to); }
API Enum nvmlDeviceGetName(void *d, char *to, unsigned n) { return cuDeviceGetName(to, (int)n, 0); }
API Enum nvmlDeviceGetIndex(void *d, unsigned *to) { *to = (unsigned)(uintptr_t)d - 1; return 0; }
API Enum nvmlDeviceGetUUID(void *d, char *to, unsigned n) {
  unsigned b = (unsigned)(uintptr_t)d;
  snprintf(to, n, "GPU-%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x", b, b, b, b, b, b, b, b, b, b, b, b, b, b, b, b);
  return 0;
}
API Enum nvmlDeviceGetMemoryInfo(void *d, uint64_t *to) {  // total, free, used
  size_t used, total;
  hollow_memory((int)(uintptr_t)d - 1, &used, &total);
  to[0] = total, to[1] = total - used, to[2] = used;
  return 0;
}
API Enum nvmlDeviceGetUtilizationRates(void *d, unsigned *to) { to[0] = to[1] = 0; return 0; }
API Enum nvmlDeviceGetGpuFabricInfoV(void *d, void *to) { memset((char *)to + 4, 0, 28); return 0; }  // state 0: none
API Enum nvmlDeviceGetComputeRunningProcesses(void *d, unsigned *n, void *to) { *n = 0; return 0; }
API Enum nvmlDeviceGetNvLinkRemoteDeviceType(void *d, unsigned link, void *to) { return NOT_SUPPORTED; }
API Enum nvmlDeviceGetNvLinkRemotePciInfo_v2(void *d, unsigned link, void *to) { return NOT_SUPPORTED; }
