#pragma once

#include <math.h>
#include <stdint.h>

#include "vectors.h"

#define FOUR _Pragma("GCC unroll 4") for (int i = 0; i < 4; i++) /* side by side */

/* log(sum(exp)) of each row of scores [rows, size] / scale, and the entropy in nats, [rows] each. */
typedef struct {
    const float *scores;
    float *sums, *entropies;
    int64_t rows, size;
    float scale;
} Sums;

/* Of each row of scores [rows, size] the `count` largest in falling order and their places, [rows,
   count] each, and log(sum(exp)) [rows]. */
typedef struct {
    const float *scores;
    float *values, *sums;
    int64_t *places;
    int64_t rows, size, count;
} Guesses;

/* One part's rows. */
void guess_part(const void *guesses, int part, int parts);

/* The sum of e^(x / scale - high), and to *mean, unless it is NULL, is added that of each times its
   exponent; what is under -1000 adds nothing. */
double share_sum(const float *x, int size, float scale, float high, double *mean);

INLINE float most_of(const float *x, int size) {
    vec most[4];
    FOUR most[i] = all(-INFINITY);
    int j = 0;
    for (; j + 4 * LANES <= size; j += 4 * LANES)
        FOUR most[i] = larger(load(x + j + i * LANES), most[i]);
    float high = highest(larger(larger(most[0], most[1]), larger(most[2], most[3])));
    for (; j < size; j++) high = x[j] > high ? x[j] : high;
    return high;
}
