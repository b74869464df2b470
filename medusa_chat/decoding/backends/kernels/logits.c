#include "logits.h"

#include <math.h>
#include <stddef.h>

#include "vectors.h"

#define FOUR _Pragma("GCC unroll 4") for (int i = 0; i < 4; i++) /* sums side by side */

INLINE float most_of(const float *x, int size) {
    vec most[4];
    FOUR most[i] = all(-INFINITY);
    float high = -INFINITY;
    int j = 0;
    for (; j + 4 * LANES <= size; j += 4 * LANES)
        FOUR most[i] = larger(load(x + j + i * LANES), most[i]);
    most[0] = larger(larger(most[0], most[1]), larger(most[2], most[3]));
    for (int l = 0; l < LANES; l++) high = most[0][l] > high ? most[0][l] : high;
    for (; j < size; j++) high = x[j] > high ? x[j] : high;
    return high;
}

float log_sum(const float *x, int size, float temperature, float *entropy) {
    vec sum = all(0.0f), mean = all(0.0f);
    const float high = most_of(x, size), scale = 1.0f / temperature;
    for (int j = 0; j < size; j += LANES) {
        vec y = all(-INFINITY);
        if (j + LANES <= size) y = load(x + j);
        else
            for (int l = 0; j + l < size; l++) y[l] = x[j + l];
        y = (y - high) * scale;
        const vec share = exponential(y);
        sum += share;
        if (entropy) mean = fused(share, pick(y > all(-1000.0f), y, all(0.0f)), mean);
    }
    const float whole = total(sum), log_whole = logf(whole);
    if (entropy) *entropy = log_whole - total(mean) / whole;
    return high * scale + log_whole;
}

EXPORT float certainty(const float *x, int size, float temperature, int64_t place) {
    const int at = (int)place;
    const float before = most_of(x, at), behind = most_of(x + at + 1, size - at - 1);
    const float rival = before > behind ? before : behind;
    return 1.0f / (1.0f + expf((rival - x[place]) / temperature));
}

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

void find_best(const float *x, int size, int count, float *values, int64_t *places) {
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

int64_t argmax(const float *x, const float *noise, int size, float temperature) {
    const vec scale = all(temperature);
    float most = -INFINITY;
    int64_t found = 0;
    vec best[4];
    ints at[4], here = {0, 1, 2, 3, 4, 5, 6, 7};
    FOUR best[i] = all(-INFINITY), at[i] = here;
    int j = 0;
    for (; j + 4 * LANES <= size; j += 4 * LANES, here += 4 * LANES)
        FOUR {
            vec y = load(x + j + i * LANES);
            if (noise) y = y / scale + load(noise + j + i * LANES);
            const ints is_more = y > best[i];
            best[i] = larger(y, best[i]);
            at[i] = (is_more & (here + i * LANES)) | (~is_more & at[i]);
        }
    FOUR for (int l = 0; l < LANES; l++)
        if (best[i][l] > most || (best[i][l] == most && at[i][l] < found))
            most = best[i][l], found = at[i][l];
    for (; j < size; j++) {
        float y = noise ? x[j] / temperature + noise[j] : x[j];
        if (y > most) most = y, found = j;
    }
    return found;
}

int is_sound(const float *x, int size) {
    const float high = most_of(x, size);
    int j = 0, is_number = 1;
    ints numbers = ~(ints){0};
    for (; j + LANES <= size; j += LANES) numbers &= load(x + j) == load(x + j);
    for (int l = 0; l < LANES; l++) is_number &= numbers[l] != 0;
    for (; j < size; j++) is_number &= x[j] == x[j];
    return is_number && high < INFINITY && high > -INFINITY;
}
