#include "logits.h"

#include <math.h>
#include <stddef.h>

#include "vectors.h"

INLINE float most_of(const float *x, int size) {
    vec most = all(-INFINITY);
    float high = -INFINITY;
    int j = 0;
    for (; j + LANES <= size; j += LANES) most = pick(load(x + j) > most, load(x + j), most);
    for (int l = 0; l < LANES; l++) high = most[l] > high ? most[l] : high;
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

EXPORT float chance(const float *x, int size, float temperature, int64_t place, float least) {
    const float low = x[place] - temperature * logf(least / (1.0f - least));
    ints near = {0}; /* minus how many are as probable as a second one may be */
    int j = 0, rivals = -1;
    for (; j + LANES <= size; j += LANES) near += load(x + j) > all(low);
    for (int l = 0; l < LANES; l++) rivals -= near[l];
    for (; j < size; j++) rivals += x[j] > low;
    if (rivals > 0) return 0.0f;
    return expf(x[place] / temperature - log_sum(x, size, temperature, NULL));
}

void find_best(const float *x, int size, int count, float *values, int64_t *places) {
    int known = 0;
    for (int j = 0; j < size; j++) {
        if (known == count && !(x[j] > values[count - 1])) continue;
        int at = known < count ? known++ : count - 1;
        for (; at > 0 && x[j] > values[at - 1]; at--)
            values[at] = values[at - 1], places[at] = places[at - 1];
        values[at] = x[j], places[at] = j;
    }
}

int64_t argmax(const float *x, const float *noise, int size, float temperature) {
    float most = -INFINITY;
    int64_t found = 0;
    vec best = all(-INFINITY);
    ints at = {0}, here = {0, 1, 2, 3, 4, 5, 6, 7};
    int j = 0;
    for (; j + LANES <= size; j += LANES, here += LANES) {
        vec y = load(x + j);
        if (noise) y = y / temperature + load(noise + j);
        ints is_more = y > best;
        best = pick(is_more, y, best);
        at = (is_more & here) | (~is_more & at);
    }
    for (int l = 0; l < LANES; l++)
        if (best[l] > most || (best[l] == most && at[l] < found)) most = best[l], found = at[l];
    for (; j < size; j++) {
        float y = noise ? x[j] / temperature + noise[j] : x[j];
        if (y > most) most = y, found = j;
    }
    return found;
}

int is_sound(const float *x, int size) {
    float high = -INFINITY;
    int j = 0, is_number = 1;
    vec most = all(-INFINITY);
    ints numbers = ~(ints){0};
    for (; j + LANES <= size; j += LANES) {
        const vec y = load(x + j);
        numbers &= y == y;
        most = pick(y > most, y, most);
    }
    for (int l = 0; l < LANES; l++) {
        is_number &= numbers[l] != 0;
        high = most[l] > high ? most[l] : high;
    }
    for (; j < size; j++) {
        is_number &= x[j] == x[j];
        high = x[j] > high ? x[j] : high;
    }
    return is_number && high < INFINITY && high > -INFINITY;
}
