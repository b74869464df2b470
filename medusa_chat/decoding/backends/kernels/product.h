/* Products of a few rows with packed weights. */

#pragma once

#include "vectors.h"

#if defined(__AVX512VL__) || defined(__aarch64__)
#define VECTORS 4 /* of a panel, so that six rows of it have their sums in 32 registers, or in 16 */
#else
#define VECTORS 2
#endif
#define PANEL (VECTORS * LANES)

/* y [rows, outs] = x [rows, ins] w^T (+ bias) (+ y). w is packed: panels of PANEL outputs,
   each [ins, PANEL]; what is beyond the last output is 0. is_half: panels are of bf16, [ins / 2,
   PANEL, 2], and x is rounded to bf16 first; sums are of floats all the same. */
typedef struct {
    const void *x, *w;
    const float *bias;
    float *y;
    int rows, ins, outs, adds, is_half;
} Product;

/* The product for `multiply`, with x rounded where that has to be. It stands in this thread's own
   memory, until the thread makes the next one ready. */
Product ready(const Product *p);

/* The panels from `at` to `end` of every row. */
void multiply(const Product *p, int at, int end);

/* One part's panels of all. */
void share(const Product *p, int part, int parts);
