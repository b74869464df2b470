/* Products of a few rows with packed weights. */

#pragma once

/* y [rows, outs] = x [rows, ins] w^T (+ bias) (+ y). w is packed: panels of eight outputs, each
   [ins, 8]; what is beyond the last output is 0. */
typedef struct {
    const float *x, *w, *bias;
    float *y;
    int rows, ins, outs, adds;
} Product;

/* The panels from `at` to `end` of every row. */
void multiply(const Product *p, int at, int end);

/* One part's panels of a product, of the `panels` from `base` on. */
void share(const Product *p, int base, int panels, int part, int parts);
