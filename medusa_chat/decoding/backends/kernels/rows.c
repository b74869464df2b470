/* What is read from rows of scores: the sum of their shares, and the largest few. No rule. */

#include "rows.h"

#include <math.h>
#include <stddef.h>

#include "team.h"
#include "vectors.h"

#define STRETCH 1024 /* shares summed in fp32: a row has too many for that */

double share_sum(const float *x, int size, float scale, float high, double *mean) {
    double sum = 0;
    for (int from = 0; from < size; from += STRETCH) {
        const int end = least(from + STRETCH, size);
        vec shares = all(0.0f), means = all(0.0f);
        for (int j = from; j < end; j += LANES) {
            vec y = all(-INFINITY);
            if (j + LANES <= end) y = load(x + j) / scale;
            else
                for (int l = 0; j + l < end; l++) y[l] = x[j + l] / scale;
            y -= high;
            const vec share = exponential(y);
            shares += share;
            if (mean) means = fused(share, pick(y > all(-1000.0f), y, all(0.0f)), means);
        }
        sum += total(shares);
        if (mean) *mean += total(means);
    }
    return sum;
}

/* log(sum(exp(x / scale))), and where it is wanted the entropy of that distribution in nats. */
static float log_sum(const float *x, int size, float scale, float *entropy) {
    const float high = most_of(x, size) / scale;
    double mean = 0;
    const double whole = share_sum(x, size, scale, high, entropy ? &mean : NULL);
    if (entropy) *entropy = (float)(log(whole) - mean / whole);
    return high + (float)log(whole);
}

static void sum_part(const void *what, int part, int parts) {
    const Sums *s = what;
    for (int i = part; i < s->rows; i += parts)
        s->sums[i] = log_sum(s->scores + (ptrdiff_t)i * s->size, (int)s->size, s->scale,
                             s->entropies + i);
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
    if (count == 0) return;
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
        g->sums[i] = log_sum(x, (int)g->size, 1, NULL);
    }
}

EXPORT void guesses(const Guesses *g, int64_t threads) { together(guess_part, g, (int)threads); }
