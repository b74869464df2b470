/* Products of a few rows with packed weights. */

#pragma once

#include "vectors.h"
#include "weights.h"

/* y [rows, outs] = x [rows, ins] w^T (+ bias) (+ y). x is
   rounded first, but for FLOATS and UPPERS: to bf16, or for packed weights to 8 bits. stride: words
   of a row of x, which `ready` sets. */
typedef struct {
    const void *x;
    Weights weights;
    const float *bias;
    float *y;
    int rows, ins, outs, adds, stride;
} Product;

/* Sums to where they go; the last ones of a row may be fewer. */
INLINE void put(const Product *p, int row, int out, vec sums) {
    float *y = p->y + (ptrdiff_t)row * p->outs + out;
    if (out + LANES <= p->outs) {
        if (p->bias) sums += load(p->bias + out);
        store(y, p->adds ? load(y) + sums : sums);
        return;
    }
    for (int j = 0; out + j < p->outs; j++) {
        float sum = sums[j];
        if (p->bias) sum += p->bias[out + j];
        y[j] = p->adds ? y[j] + sum : sum;
    }
}

INLINE void put_wide(const Product *p, int row, int out, wide sums) {
    const float *each = (const float *)&sums;
    for (int j = 0; j < WIDTH; j += LANES) put(p, row, out + j, load(each + j));
}

INLINE int panels_of(const Product *p) { return (p->outs + PANEL - 1) / PANEL; }

/* The product for `multiply`, with x rounded where that has to be. It stands in this thread's own
   memory, until the thread makes the next one ready. */
Product ready(const Product *p);

/* The panels from `at` to `end` of every row. */
void multiply(const Product *p, int at, int end);

/* The panels from `at` to `end` of each of several products with one x and as many outputs, which is
   rounded once for those that read it alike. */
void multiply_alike(const Product *all, int count, int at, int end);

/* One part's panels of several products. */
void share_all(const Product *all, int count, int part, int parts);

/* Of one. */
INLINE void share(const Product *p, int part, int parts) { share_all(p, 1, part, parts); }
