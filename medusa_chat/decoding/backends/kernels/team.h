/* The team: threads that do one job together, each its part of every piece of it. */

#pragma once

#include <stdint.h>

#include "compiler.h"

typedef void (*Job)(const void *what, int part, int parts);

/* Do a job with `parts` threads, fewer where no more can be had; alone where the team has one. */
void together(Job job, const void *what, int parts);

/* Within a job, by each of its parts: nobody goes on before all are here. */
void meet(int part, int parts);

/* What of `count` things is one part's: from first(...) of this part to first(...) of the next. */
INLINE int first(int count, int part, int parts) { return (int)((int64_t)count * part / parts); }
