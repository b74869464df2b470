/* What is read from rows of scores: the largest with noise, and the sum of their shares. No rule. */

#include "rows.h"

#include <math.h>
#include <stddef.h>

#include "team.h"
#include "vectors.h"

#define FOUR _Pragma("GCC unroll 4") for (int i = 0; i < 4; i++) /* sums side by side */

typedef uint32_t words __attribute__((vector_size(32)));

/* MurmurHash3's finaliser, of words and of vectors of them. */
#define MIXED(x)                         \
    do {                                 \
        x = (x ^ x >> 16) * 0x85EBCA6Bu; \
        x = (x ^ x >> 13) * 0xC2B2AE35u; \
        x = x ^ x >> 16;                 \
    } while (0)

INLINE uint32_t mix(uint32_t x) {
    MIXED(x);
    return x;
}

/* The reference of this noise is acceptance.gumbel; test_native_rows.py compares them.
   out [size]: the Gumbel noise of a place in the text, as acceptance.py draws it but for the last
   digits. */
static void noise_at(uint64_t seed, uint32_t place, float *out, int size) {
    const uint32_t low = (uint32_t)seed, high = (uint32_t)(seed >> 32);
    const uint32_t start = mix(low + 0x9E3779B9u);
    const uint32_t key = mix(start ^ (mix(place * 0x85EBCA77u + 1) + mix(start + high)));
    const uint32_t other = mix(key + 0x27D4EB2Fu);
    for (int j = 0; j < size; j += LANES) {
        words x;
        for (int l = 0; l < LANES; l++) x[l] = (uint32_t)(j + l) * 0x9E3779B1u + key;
        MIXED(x);
        x ^= other;
        MIXED(x);
        vec uniform = (__builtin_convertvector((ints)(x >> 9), vec) + 0.5f) * 0x1p-23f;
        vec gumbel = -logarithm(-logarithm(uniform));
        if (j + LANES <= size) store(out + j, gumbel);
        else
            for (int l = 0; j + l < size; l++) out[j + l] = gumbel[l];
    }
}

/* The place of the largest x + noise, the first of equals, and how far the next one is below it. */
static int64_t largest(const float *x, const float *noise, int size, float *gap) {
    vec best = all(-INFINITY), next = best;
    ints at = {0}, here = {0, 1, 2, 3, 4, 5, 6, 7};
    int j = 0;
    for (; j + LANES <= size; j += LANES, here += LANES) {
        const vec y = noise ? load(x + j) + load(noise + j) : load(x + j);
        const ints is_more = y > best;
        next = larger(next, smaller(best, y));
        best = larger(y, best);
        at = (is_more & here) | (~is_more & at);
    }
    float most = -INFINITY, second = -INFINITY;
    int64_t found = 0;
    for (int l = 0; l < LANES; l++) {
        const int is_more = best[l] > most || (best[l] == most && at[l] < found);
        const float lost = is_more ? most : best[l];
        second = fmaxf(second, fmaxf(lost, next[l]));
        if (is_more) most = best[l], found = at[l];
    }
    for (; j < size; j++) {
        const float y = noise ? x[j] + noise[j] : x[j];
        second = fmaxf(second, fminf(most, y));
        if (y > most) most = y, found = j;
    }
    *gap = most - second;
    return found;
}

/* In its text, of what has this depth. */
INLINE int64_t place_of(const Draw *d, int64_t depth) {
    return d->places ? d->places[depth] : d->place + depth;
}

static void draw_part(const void *what, int part, int parts) {
    const Draw *d = what;
    const int size = (int)d->size;
    for (int i = part; d->noise && i <= d->deepest; i += parts)
        if (place_of(d, i) >= 0)
            noise_at(d->seeds ? d->seeds[i] : d->seed, (uint32_t)place_of(d, i),
                     d->noise + (ptrdiff_t)i * size, size);
    meet(part, parts);
    for (int i = part; i < d->rows; i += parts) {
        const int has_noise = d->noise && place_of(d, d->depths[i]) >= 0;
        const float *noise = has_noise ? d->noise + (ptrdiff_t)d->depths[i] * size : NULL;
        d->tokens[i] = largest(d->scores + (ptrdiff_t)i * size, noise, size, d->gaps + i);
    }
}

EXPORT void draw(const Draw *d, int64_t threads) { together(draw_part, d, (int)threads); }

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

/* log(sum(exp(x))), and where it is wanted the entropy of that distribution in nats. */
static float log_sum(const float *x, int size, float *entropy) {
    vec sum = all(0.0f), mean = all(0.0f);
    const float high = most_of(x, size);
    for (int j = 0; j < size; j += LANES) {
        vec y = all(-INFINITY);
        if (j + LANES <= size) y = load(x + j);
        else
            for (int l = 0; j + l < size; l++) y[l] = x[j + l];
        y -= high;
        const vec share = exponential(y);
        sum += share;
        if (entropy) mean = fused(share, pick(y > all(-1000.0f), y, all(0.0f)), mean);
    }
    const float whole = total(sum), log_whole = logf(whole);
    if (entropy) *entropy = log_whole - total(mean) / whole;
    return high + log_whole;
}

static void sum_part(const void *what, int part, int parts) {
    const Sums *s = what;
    for (int i = part; i < s->rows; i += parts)
        s->sums[i] = log_sum(s->scores + (ptrdiff_t)i * s->size, (int)s->size, s->entropies + i);
}

EXPORT void row_sums(const Sums *s, int64_t threads) { together(sum_part, s, (int)threads); }

/* The largest from `at` to `end`, among those that are known. */
INLINE int insert(const float *x, int at, int end, int count, int known, float *values,
                  int64_t *places) {
    for (; at < end; at++) {
        if (known == count && !(x[at] > values[count - 1])) continue;
        int k = known < count ? known++ : count - 1;
        for (; k > 0 && x[at] > values[k - 1]; k--)
            values[k] = values[k - 1], places[k] = places[k - 1];
        values[k] = x[at], places[k] = at;
    }
    return known;
}

/* The `count` largest in falling order, the first of equals first, and their places. */
static void find_best(const float *x, int size, int count, float *values, int64_t *places) {
    int j = least(4 * LANES * ((count + 4 * LANES - 1) / (4 * LANES)), size);
    int known = insert(x, 0, j, count, 0, values, places);
    for (; j + 4 * LANES <= size; j += 4 * LANES) {
        const vec limit = all(values[count - 1]);
        ints more[4];
        FOUR more[i] = load(x + j + i * LANES) > limit;
        if (has_any((more[0] | more[1]) | (more[2] | more[3])))
            known = insert(x, j, j + 4 * LANES, count, known, values, places);
    }
    insert(x, j, size, count, known, values, places);
}

void guess_part(const void *what, int part, int parts) {
    const Guesses *g = what;
    for (int64_t i = part; i < g->rows; i += parts) {
        const float *x = g->scores + i * g->size;
        find_best(x, (int)g->size, (int)g->count, g->values + i * g->count,
                  g->places + i * g->count);
        g->sums[i] = log_sum(x, (int)g->size, NULL);
    }
}
