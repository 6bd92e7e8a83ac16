/* Where threads allocate. */
#pragma once
#include <stdlib.h>
#ifdef __GLIBC__
#include <malloc.h>
#endif

/* Let all threads of the process share one arena; 0 where the C library has no such thing. */
static int flintmq_one_arena(void) {
#ifdef __GLIBC__
    return mallopt(M_ARENA_MAX, 1);
#else
    return 0;
#endif
}
