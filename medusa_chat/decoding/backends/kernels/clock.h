/* Seconds, from no moment in particular. */

#pragma once

#include <time.h>

#include "compiler.h"

INLINE double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}
