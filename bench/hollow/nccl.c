// Collectives of ranks that compute nothing: nothing is sent. A call fails where a buffer is not on its device or too short.
// HOLLOW_COLLECTIVES: where each process writes its calls, one a line; %d is its number. Ranks whose lines differ would wait for
// each other for ever.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define API __attribute__((visibility("default")))
typedef int Enum;
typedef struct { int ranks, rank, number; } Comm;
typedef struct { char bytes[128]; } Id;
enum { VERSION = 22907, INVALID_ARGUMENT = 4 };
extern int hollow_is_there(const void *, size_t);

static void say(const char *what, Comm *c, size_t n, int type, int more) {
  static FILE *file;
  const char *path = getenv("HOLLOW_COLLECTIVES");
  char named[4096];
  if (!path || !*path) return;
  if (!file) snprintf(named, sizeof named, path, (int)getpid()), file = fopen(named, "w");
  if (file) fprintf(file, "%s group %d of %d, %zu x type %d, %d\n", what, c->number, c->ranks, n, type, more), fflush(file);
}
// `sent` and `got` are numbers of elements of a rank
static Enum called(const char *what, Comm *c, const void *a, size_t sent, const void *b, size_t got, Enum type, int more) {
  static const size_t sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};  // ncclDataType_t
  if (type < 0 || type > 11) return INVALID_ARGUMENT;
  int is_wrong = (a && sent && !hollow_is_there(a, sent * sizes[type])) || (b && got && !hollow_is_there(b, got * sizes[type]));
  if (is_wrong) fprintf(stderr, "hollow GPU: %s of a buffer that is not on this device, or too short\n", what);
  say(what, c, sent > got ? sent : got, type, more);
  return is_wrong ? INVALID_ARGUMENT : 0;
}
static Enum joined(Comm **to, int ranks, int rank) {
  static int number;
  Comm *new = calloc(1, 256);
  *new = (Comm){ranks, rank, number++};
  *to = new;
  say("joined", new, 0, 0, 0);
  return 0;
}
API Enum ncclGetVersion(int *v) { *v = VERSION; return 0; }
API Enum ncclGetUniqueId(Id *to) { memset(to, 7, sizeof *to); return 0; }
API Enum ncclCommInitRank(Comm **to, int n, Id id, int rank) { return joined(to, n, rank); }
API Enum ncclCommInitRankConfig(Comm **to, int n, Id id, int rank, void *c) { return joined(to, n, rank); }
API Enum ncclCommSplit(Comm *from, int color, int key, Comm **to, void *c) { return joined(to, from->ranks, key); }
API Enum ncclCommCount(Comm *c, int *n) { *n = c->ranks; return 0; }
API Enum ncclCommUserRank(Comm *c, int *n) { *n = c->rank; return 0; }
API Enum ncclCommGetAsyncError(Comm *c, Enum *e) { *e = 0; return 0; }
API Enum ncclCommFinalize(Comm *c) { return 0; }
API Enum ncclCommDestroy(Comm *c) { return 0; }
API Enum ncclCommAbort(Comm *c) { return 0; }
API Enum ncclCommRegister(Comm *c, void *b, size_t n, void **h) { *h = c; return 0; }
API Enum ncclCommDeregister(Comm *c, void *h) { return 0; }
API const char *ncclGetErrorString(Enum e) { return e ? "hollow NCCL error" : "no error"; }
API const char *ncclGetLastError(Comm *c) { return ""; }
API Enum ncclGroupStart(void) { return 0; }
API Enum ncclGroupEnd(void) { return 0; }
API Enum ncclAllReduce(const void *a, void *b, size_t n, Enum t, Enum o, Comm *c, void *s) { return called("all-reduce", c, a, n, b, n, t, o); }
API Enum ncclAllGather(const void *a, void *b, size_t n, Enum t, Comm *c, void *s) { return called("all-gather", c, a, n, b, n * c->ranks, t, 0); }
API Enum ncclReduceScatter(const void *a, void *b, size_t n, Enum t, Enum o, Comm *c, void *s) {
  return called("reduce-scatter", c, a, n * c->ranks, b, n, t, o);
}
API Enum ncclBroadcast(const void *a, void *b, size_t n, Enum t, int r, Comm *c, void *s) {
  return called("broadcast", c, c->rank == r ? a : NULL, n, b, n, t, r);
}
API Enum ncclBcast(void *b, size_t n, Enum t, int r, Comm *c, void *s) { return called("broadcast", c, NULL, 0, b, n, t, r); }
API Enum ncclReduce(const void *a, void *b, size_t n, Enum t, Enum o, int r, Comm *c, void *s) {
  return called("reduce", c, a, n, c->rank == r ? b : NULL, n, t, r);
}
API Enum ncclSend(const void *a, size_t n, Enum t, int p, Comm *c, void *s) { return called("send", c, a, n, NULL, 0, t, p); }
API Enum ncclRecv(void *b, size_t n, Enum t, int p, Comm *c, void *s) { return called("receive", c, NULL, 0, b, n, t, p); }
API Enum ncclRedOpCreatePreMulSum(Enum *o, void *f, Enum t, Enum r, Comm *c) { *o = 0; return 0; }
API Enum ncclRedOpDestroy(Enum o, Comm *c) { return 0; }
