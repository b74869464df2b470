#pragma once

#include <stdint.h>

/* A sample of each row of scores [rows, size], tokens [rows]: of scores / scale that top_k, top_p
   and min_p leave (acceptance.filtered), the largest with its noise, the first of equals.
   top_k 0, top_p 1, min_p (a logarithm) -inf: leave all. unsure [rows], bytes: whether rounding
   might have it otherwise.
   The noise of row i is that of place + depths[i] in the text, by `seed`; with `places` and `seeds`
   [rows], of places[i] by seeds[i]; none where this is under 0, or without depths and places: then
   nothing is left out either. work: draw_work(size) numbers for each thread. */
typedef struct {
    const float *scores;
    const int64_t *depths, *places;
    const uint64_t *seeds;
    float *work;
    int64_t *tokens;
    uint8_t *unsure;
    uint64_t seed;
    int64_t rows, size, place, top_k;
    float scale, top_p, min_p;
} Draw;
