#pragma once

#include <stdint.h>

/* The largest of each row of scores [rows, size] with the noise of its depth, tokens [rows], the
   first of equals, and how far the next one is below it, gaps [rows]. noise [deepest + 1, size] is
   worked in; NULL: none is added. place: of depth 0 in the text; depths [rows].
   places, seeds [deepest + 1]: every depth's own instead; NULL: they follow from `place`, by `seed`.
   A place under 0 has no noise. */
typedef struct {
    const float *scores;
    const int64_t *depths, *places;
    const uint64_t *seeds;
    float *noise, *gaps;
    int64_t *tokens;
    uint64_t seed;
    int64_t rows, size, place, deepest;
} Draw;

/* log(sum(exp)) of each row of scores [rows, size], and the entropy in nats, [rows] each. */
typedef struct {
    const float *scores;
    float *sums, *entropies;
    int64_t rows, size;
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
