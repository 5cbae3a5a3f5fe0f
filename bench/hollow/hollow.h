// What the stand-ins share: counts, which cudart.c keeps, and faults that it is told of.
#include <stdint.h>

#define API __attribute__((visibility("default")))
struct counts {
  uint64_t launches, waits, copies_up, copies_down, bytes_up, bytes_down, waits_for_copies, products, allocations;
  double flops;
};
extern struct counts hollow_counts;
enum { FAULT_PRODUCT = 2, FAULT_BREAK = 4, ALLOC_FAILED = 3, EXECUTION_FAILED = 13 };  // CUBLAS_STATUS_... the last two
extern int hollow_fails(int which);
extern void hollow_launched(const char *name);
