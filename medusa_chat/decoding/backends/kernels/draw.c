/* Samples of rows of scores, in one reading of a row and another of its likely tokens. No rule:
   acceptance.py has it, and test_native_rows.py compares them.

   Noise is -log(-log(u)) of 23 random bits, so it is never more than MOST_NOISE. Once the largest
   score is known with its own noise, what lies further below needs none: of 152,000 tokens some
   hundreds are left. */

#include "draw.h"

#include <math.h>
#include <stddef.h>

#include "rows.h"
#include "team.h"
#include "vectors.h"

#define BLOCK 64
#define MOST_NOISE 16.64f /* -log(-log(1 - 2^-24)) is 16.6355 */
#define NEAR 3e-5f /* a tie as near as this, as a share of the largest score too, is unsure */
#define EDGE 1e-4  /* a share of top_p's: as near to its end as this a token's place is unsure */
#define BUCKETS 512 /* into which many scores are sorted first */
#define FAR 64.0f /* below the largest: all such scores fall into the last bucket */
#define REACH 10.0f /* below the largest, where top_p first looks for its tokens */

typedef uint32_t words __attribute__((vector_size(32)));

/* Some tokens of a row in their order, and the scores and shares (e^(score - largest)) of each.
   spare: to work in. */
typedef struct {
    float *scores, *shares, *spare;
    int32_t *tokens;
    int count;
} Likely;

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

/* Of a place in the text, which its tokens' noise is made from. */
static uint32_t key_of(uint64_t seed, uint32_t place) {
    const uint32_t low = (uint32_t)seed, high = (uint32_t)(seed >> 32);
    const uint32_t start = mix(low + 0x9E3779B9u);
    return mix(start ^ (mix(place * 0x85EBCA77u + 1) + mix(start + high)));
}

/* The Gumbel noise of eight tokens, as acceptance.gumbel has it but for the last digits. */
static vec noise_of(const int32_t *tokens, uint32_t key) {
    words x = (words)load((const float *)tokens) * 0x9E3779B1u + key;
    MIXED(x);
    x ^= mix(key + 0x27D4EB2Fu);
    MIXED(x);
    const vec uniform = (__builtin_convertvector((ints)(x >> 9), vec) + 0.5f) * 0x1p-23f;
    return -logarithm(-logarithm(uniform));
}

/* The largest of each BLOCK of a row, and of all. */
static float read_blocks(const float *x, int size, float *blocks) {
    float most = -INFINITY;
    for (int b = 0; b * BLOCK < size; b++) {
        const float high = most_of(x + b * BLOCK, least(BLOCK, size - b * BLOCK));
        blocks[b] = high;
        most = high > most ? high : most;
    }
    return most;
}

/* The first token of this score; 0 where there is none. */
static int find(const float *x, int size, const float *blocks, float score) {
    for (int b = 0; b * BLOCK < size; b++)
        for (int j = b * BLOCK; blocks[b] == score && j < least((b + 1) * BLOCK, size); j++)
            if (x[j] == score) return j;
    return 0;
}

/* The tokens whose score / scale is at least `lowest`. */
static void collect(const Draw *d, const float *x, const float *blocks, float lowest, Likely *to) {
    const ints count = {0, 1, 2, 3, 4, 5, 6, 7};
    const int size = (int)d->size;
    to->count = 0;
    for (int j = 0; j < size; j += LANES) {
        if (j % BLOCK == 0 && !(blocks[j / BLOCK] / d->scale >= lowest)) {
            j += BLOCK - LANES;
            continue;
        }
        vec y = all(-INFINITY);
        if (j + LANES <= size) y = load(x + j) / d->scale;
        else
            for (int l = 0; j + l < size; l++) y[l] = x[j + l] / d->scale;
        const ints is_likely = y >= lowest;
        if (!has_any(is_likely)) continue;
        float *const scores = to->scores + to->count;
        int32_t *const tokens = to->tokens + to->count;
        store(scores, y);
        store((float *)tokens, (vec)(count + j));
        int n = has_any(~is_likely) ? 0 : LANES, l = n;
        for (; l < LANES && j + l < size; l++) {
            scores[n] = scores[l], tokens[n] = tokens[l];
            n += scores[l] >= lowest;
        }
        to->count += n;
    }
}

/* Leave out what is under `lowest`. */
static void cut(Likely *of, float lowest) {
    float *const scores = of->scores, *const shares = of->shares;
    int32_t *const tokens = of->tokens;
    int n = 0;
    for (int i = 0, count = of->count; i < count; i++) {
        const float score = scores[i], share = shares[i];
        const int32_t token = tokens[i];
        scores[n] = score, shares[n] = share, tokens[n] = token;
        n += score >= lowest;
    }
    of->count = n;
}

/* Leaves of `count` numbers, and their weights, those among which the boundary is, in front, and
   takes from the limit what is above these. */
static int narrow(float *x, float *weights, int count, double *limit) {
    const float high = most_of(x, count);
    double sums[BUCKETS] = {0}, above = 0;
    float low = high;
    for (int i = 0; i < count; i++) low = x[i] < low && x[i] > high - FAR ? x[i] : low;
    const float each = (high - low) / (BUCKETS - 1);
#define BUCKET(y) (int)fminf((high - (y)) / each, BUCKETS - 1)
    if (!(each > 0)) return count;
    for (int i = 0; i < count; i++) sums[BUCKET(x[i])] += weights ? weights[i] : 1;
    int bucket = 0, last = BUCKETS - 1, n = 0;
    while (last > 0 && sums[last] == 0) last--;
    for (; bucket < last && above + sums[bucket] < *limit; bucket++) above += sums[bucket];
    *limit -= above;
    for (int i = 0; i < count; i++) {
        const int is_here = BUCKET(x[i]) == bucket;
        x[n] = x[i];
        if (weights) weights[n] = weights[i];
        n += is_here;
    }
    return n;
}

/* The smallest of `count` numbers for which those above it weigh less than `limit` together (1 each
   without weights): of those that do not come to it, the smallest. Both are put in another order. */
static float boundary(float *x, float *weights, int count, double limit) {
    float found = INFINITY;
    if (count > BUCKETS) count = narrow(x, weights, count, &limit);
    while (count > 0) {
        const float a = x[0], b = x[count / 2], c = x[count - 1];
        const float pivot = fmaxf(fminf(a, b), fminf(fmaxf(a, b), c));
        double above = 0, equal = 0;
        int from = 0, at = 0, to = count; /* larger ones, equal ones, unread, smaller ones */
        while (at < to) {
            const float y = x[at], w = weights ? weights[at] : 1;
            const int other = y > pivot ? from++ : y < pivot ? --to : at;
            x[at] = x[other], x[other] = y;
            if (weights) weights[at] = weights[other], weights[other] = w;
            if (y > pivot) above += w;
            if (y == pivot) equal += w;
            at += y >= pivot;
        }
        if (above >= limit) {
            count = from;
            continue;
        }
        found = pivot;
        limit -= above + equal;
        if (limit <= 0) break;
        x += to, count -= to;
        if (weights) weights += to;
    }
    return found;
}

static void weigh(Likely *of, float most) {
    for (int i = 0; i < of->count; i += LANES)
        store(of->shares + i, exponential(load(of->scores + i) - most));
}

static double weight_of(const Likely *of) {
    double sum = 0;
    for (int i = 0; i < of->count; i++) sum += of->shares[i];
    return sum;
}

/* The tokens that top-k leaves. */
static void keep_best(const Draw *d, const float *x, float *blocks, Likely *likely) {
    const int count = (int)((d->size + BLOCK - 1) / BLOCK), k = (int)d->top_k;
    float lowest = -INFINITY;
    for (int b = 0; b < count; b++) likely->spare[b] = blocks[b];
    if (k <= count) lowest = boundary(likely->spare, NULL, count, k) / d->scale;
    collect(d, x, blocks, lowest, likely);
    for (int i = 0; i < likely->count; i++) likely->spare[i] = likely->scores[i];
    cut(likely, boundary(likely->spare, NULL, likely->count, k));
}

/* The lowest score that top-p leaves of likely tokens, or a little lower: `is_within` tells of one.
   whole: the sum of all shares that it chooses from. */
static float end_of_nucleus(const Draw *d, const Likely *likely, double whole) {
    float *weights = likely->spare + likely->count;
    for (int i = 0; i < likely->count; i++) {
        likely->spare[i] = likely->scores[i];
        weights[i] = likely->shares[i];
    }
    return boundary(likely->spare, weights, likely->count, (d->top_p + EDGE) * whole);
}

/* The tokens that top-p may leave, at least, of the whole row: their shares' sum is returned. */
static double find_likely(const Draw *d, const float *x, const float *blocks, float most,
                          Likely *likely) {
    const double whole = share_sum(x, (int)d->size, d->scale, most, NULL);
    for (float reach = REACH;; reach *= reach) {
        const int is_all = reach > 1e6f;
        collect(d, x, blocks, is_all ? -INFINITY : most - reach, likely);
        weigh(likely, most);
        if (is_all || weight_of(likely) > (d->top_p + 2 * EDGE) * whole) return whole;
    }
}

/* Whether what comes before a token, by its score and then its number, is less than top_p. */
static int is_within(const Draw *d, const Likely *likely, int place, double whole) {
    const float score = likely->scores[place];
    double before = 0;
    for (int i = 0; i < likely->count; i++)
        if (likely->scores[i] > score || (likely->scores[i] == score && i < place))
            before += likely->shares[i];
    return before < (d->top_p - EDGE) * whole;
}

/* The place among likely tokens of the largest with noise, and how far the next is below it. */
static int largest(Likely *likely, uint32_t key, float *gap) {
    float most = -INFINITY, second = -INFINITY;
    int found = 0;
    for (int l = 0; l < LANES; l++) /* behind the last one */
        likely->scores[likely->count + l] = -INFINITY, likely->tokens[likely->count + l] = 0;
    for (int i = 0; i < likely->count; i += LANES) {
        const vec y = load(likely->scores + i) + noise_of(likely->tokens + i, key);
        if (!has_any(y > second)) continue;
        for (int l = 0; l < LANES; l++) {
            second = fmaxf(second, fminf(most, y[l]));
            if (y[l] > most) most = y[l], found = i + l;
        }
    }
    *gap = most - second;
    return found;
}

/* Draw a row's token, which is `first` without noise, of the score `most`. */
static void draw_row(const Draw *d, int row, float *blocks, float most, int first, uint32_t key,
                     Likely *likely) {
    const float *x = d->scores + (ptrdiff_t)row * d->size;
    const float near = NEAR * fmaxf(1, fabsf(most));
    const int32_t firsts[LANES] = {first};
    float lowest = fmaxf(most + noise_of(firsts, key)[0] - MOST_NOISE - near, most + d->min_p);
    const int has_best = 0 < d->top_k && d->top_k < d->size, has_nucleus = d->top_p < 1;
    double whole = 0;
    if (has_best) {
        keep_best(d, x, blocks, likely);
        weigh(likely, most);
        whole = weight_of(likely);
    } else if (has_nucleus) whole = find_likely(d, x, blocks, most, likely);
    else collect(d, x, blocks, lowest, likely);
    if (has_nucleus) lowest = fmaxf(lowest, end_of_nucleus(d, likely, whole));
    if (has_best || has_nucleus) cut(likely, lowest);
    float gap;
    const int place = largest(likely, key, &gap), token = likely->tokens[place];
    const int is_member = !has_nucleus || token == first || is_within(d, likely, place, whole);
    d->tokens[row] = token;
    d->unsure[row] = !(gap > near) || !is_member;
}

int64_t draw_blocks(int64_t size) { return (size + BLOCK - 1) / BLOCK; }

EXPORT int64_t draw_work(int64_t size) { return draw_blocks(size) + 5 * (size + LANES); }

static void draw_part(const void *what, int part, int parts) {
    const Draw *d = what;
    const ptrdiff_t size = d->size, room = size + LANES;
    float *blocks = d->work + draw_work(size) * part, *after = blocks + draw_blocks(size);
    Likely likely = {after, after + room, after + 2 * room, (int32_t *)(after + 4 * room), 0};
    for (int i = part; i < d->rows; i += parts) {
        const float *x = d->scores + i * size;
        const float most = read_blocks(x, (int)size, blocks);
        const int first = find(x, (int)size, blocks, most);
        const int64_t place = d->places ? d->places[i] : d->depths ? d->place + d->depths[i] : -1;
        d->tokens[i] = first, d->unsure[i] = 0;
        if (place < 0 || !isfinite(most)) continue;
        const uint32_t key = key_of(d->seeds ? d->seeds[i] : d->seed, (uint32_t)place);
        draw_row(d, i, blocks, most / d->scale, first, key, &likely);
    }
}

EXPORT void draw(const Draw *d, int64_t threads) { together(draw_part, d, (int)threads); }
