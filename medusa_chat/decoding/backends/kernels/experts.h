/* The gated products of a layer with experts, of which each row passes through a few. */

#pragma once

#include "pass.h"

/* x [rows, size] -> y. A pair is a row and one of its experts: there are rows * chosen. */
typedef struct {
    const Layer *layer;
    int rows, size;
    float *scores, *gate, *up, *outs; /* all parts': [rows, count], [pairs, inner] twice, [pairs, size] */
    float *y;                         /* all parts': [rows, size] */
    const float *x;                   /* the part's own, as what follows */
    float *gathered, *lists;
} Mixture;

/* Floats of scores and outs together, and of gathered and lists, for so many rows. */
int64_t mixture_size(const Layer *layer, int64_t rows, int64_t hidden);
int64_t mixture_own_size(const Layer *layer, int64_t rows, int64_t hidden);

/* One part of it: y is whole when all parts have met. What a row gets depends on no other row. */
void mix_experts(const Mixture *m, int part, int parts);
