#include "logits.h"

#include <math.h>

#include "vectors.h"

float log_sum(const float *x, int size, float temperature, float *entropy) {
    vec most = all(-INFINITY), sum = all(0.0f), mean = all(0.0f);
    float high = -INFINITY;
    int j = 0;
    for (; j + LANES <= size; j += LANES) most = pick(load(x + j) > most, load(x + j), most);
    for (int l = 0; l < LANES; l++) high = most[l] > high ? most[l] : high;
    for (; j < size; j++) high = x[j] > high ? x[j] : high;
    const float scale = 1.0f / temperature;
    for (j = 0; j < size; j += LANES) {
        vec y = all(-INFINITY);
        if (j + LANES <= size) y = load(x + j);
        else
            for (int l = 0; j + l < size; l++) y[l] = x[j + l];
        y = (y - high) * scale;
        const vec share = exponential(y);
        sum += share;
        mean = fused(share, pick(y > all(-1000.0f), y, all(0.0f)), mean);
    }
    const float whole = total(sum), log_whole = logf(whole);
    if (entropy) *entropy = log_whole - total(mean) / whole;
    return high * scale + log_whole;
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
    float most = -INFINITY;
    int is_number = 1;
    for (int j = 0; j < size; j++) {
        is_number &= x[j] == x[j];
        most = x[j] > most ? x[j] : most;
    }
    return is_number && most < INFINITY && most > -INFINITY;
}
