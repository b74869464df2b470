#include "decoder.h"

#include <math.h>
#include <stddef.h>
#include <string.h>

#include "attention.h"
#include "product.h"
#include "team.h"
#include "vectors.h"

#define WIDEST 512 /* of an attention head */

static void normalise(const float *x, const float *w, float *y, int size, float epsilon) {
    vec squares = all(0.0f);
    float rest = 0.0f;
    int k = 0;
    for (; k + LANES <= size; k += LANES) squares = fused(load(x + k), load(x + k), squares);
    for (int t = k; t < size; t++) rest += x[t] * x[t];
    float scale = 1.0f / sqrtf((total(squares) + rest) / (float)size + epsilon);
    for (k = 0; k + LANES <= size; k += LANES) store(y + k, load(x + k) * scale * load(w + k));
    for (; k < size; k++) y[k] = x[k] * scale * w[k];
}

static void normalise_all(const Pass *pass, const float *x, const float *w, float *y) {
    const int size = (int)pass->decoder->hidden;
    const float epsilon = pass->decoder->epsilon;
    for (int i = 0; i < pass->rows; i++)
        normalise(x + (ptrdiff_t)i * size, w, y + (ptrdiff_t)i * size, size, epsilon);
}

static void rotate(const float *x, const float *cosines, const float *sines, float *y, int size) {
    const int half = size / 2;
    for (int d = 0; d < half; d++) {
        float a = x[d], b = x[d + half];
        y[d] = a * cosines[d] - b * sines[d];
        y[d + half] = b * cosines[d + half] + a * sines[d + half];
    }
}

/* The rows' queries turned where they stand; their keys and values put behind the text. */
static void place(const Pass *pass, const Layer *layer, float *qkv, int row, int end) {
    const Decoder *m = pass->decoder;
    const int size = (int)m->head_dim, heads = (int)m->heads, kv = (int)m->kv_heads;
    float turned[WIDEST];
    for (int i = row; i < end; i++) {
        const float *cosines = m->cosines + pass->positions[i] * size;
        const float *sines = m->sines + pass->positions[i] * size;
        float *from = qkv + (ptrdiff_t)i * qkv_width(m);
        for (int h = 0; h < heads; h++) {
            rotate(from + h * size, cosines, sines, turned, size);
            memcpy(from + h * size, turned, sizeof(float) * size);
        }
        for (int h = 0; h < kv; h++) {
            const ptrdiff_t at = (h * m->capacity + pass->start + i) * size;
            rotate(from + (heads + h) * size, cosines, sines, layer->keys + at, size);
            memcpy(layer->values + at, from + (heads + kv + h) * size, sizeof(float) * size);
        }
    }
}

/* Columns `at` to `end` of gate_up [rows, 2 * inner] -> silu(gate) * up [rows, inner]. */
static void activate(const float *gate_up, float *y, int rows, int inner, int at, int end) {
    for (int i = 0; i < rows; i++) {
        const float *gate = gate_up + (ptrdiff_t)i * 2 * inner, *up = gate + inner;
        for (int k = at; k < end; k += LANES) {
            vec g = load(gate + k);
            store(y + (ptrdiff_t)i * inner + k, g / (1.0f + exponential(-g)) * load(up + k));
        }
    }
}

/* What one part of a pass has: where it works, alone and together with the other parts. */
typedef struct {
    const Pass *pass;
    int part, parts;
    int free;                              /* columns of the mask that hide nothing */
    float *qkv, *mixed, *gate_up, *active; /* all parts' */
    float *normed, *scratch;               /* its own */
} Part;

/* Floats of a part's own. */
static int64_t own_size(const Decoder *m, int64_t rows, int64_t keys) {
    return rows * m->hidden + (2 * m->head_dim + keys) * BLOCK;
}

/* Floats that a pass of `rows` rows over `keys` tokens works in. */
EXPORT int64_t work_size(const Decoder *m, int64_t rows, int64_t keys, int64_t threads) {
    const int64_t shared = rows * (qkv_width(m) + m->heads * m->head_dim + 3 * m->inner);
    return shared + threads * own_size(m, rows, keys);
}

static Part part_of(const Pass *pass, int part, int parts) {
    const Decoder *m = pass->decoder;
    const int64_t rows = pass->rows;
    Part p = {.pass = pass, .part = part, .parts = parts, .free = free_columns(pass)};
    p.qkv = pass->work;
    p.mixed = p.qkv + rows * qkv_width(m);
    p.gate_up = p.mixed + rows * m->heads * m->head_dim;
    p.active = p.gate_up + rows * 2 * m->inner;
    p.normed = p.active + rows * m->inner + part * own_size(m, rows, pass->start + rows);
    p.scratch = p.normed + rows * m->hidden;
    return p;
}

/* The hidden states, with what attention adds. */
static void attend_layer(const Part *p, const Layer *layer) {
    const Pass *pass = p->pass;
    const Decoder *m = pass->decoder;
    const int rows = (int)pass->rows, size = (int)m->hidden, part = p->part, parts = p->parts;
    const int width = qkv_width(m), mixes = (int)(m->heads * m->head_dim);
    const int blocks = (rows * (int)(m->heads / m->kv_heads) + BLOCK - 1) / BLOCK;
    const int tasks = (int)m->kv_heads * blocks;
    const Product qkv = {p->normed, layer->qkv, layer->qkv_bias, p->qkv, rows, size, width, 0};
    const Product out = {p->mixed, layer->out, layer->out_bias, pass->hidden, rows, mixes, size, 1};
    normalise_all(pass, pass->hidden, layer->before, p->normed);
    share(&qkv, 0, width / LANES, part, parts);
    meet(parts);
    place(pass, layer, p->qkv, first(rows, part, parts), first(rows, part + 1, parts));
    meet(parts);
    for (int t = first(tasks, part, parts); t < first(tasks, part + 1, parts); t++)
        attend(pass, layer, p->qkv, t / blocks, t % blocks * BLOCK, p->free, p->scratch, p->mixed);
    meet(parts);
    share(&out, 0, size / LANES, part, parts);
    meet(parts);
}

/* The hidden states, with what the gated products add. */
static void feed_forward(const Part *p, const Layer *layer) {
    const Pass *pass = p->pass;
    const int rows = (int)pass->rows, size = (int)pass->decoder->hidden;
    const int inner = (int)pass->decoder->inner, panels = inner / LANES;
    const int part = p->part, parts = p->parts;
    const int at = LANES * first(panels, part, parts), end = LANES * first(panels, part + 1, parts);
    const Product wide = {
        p->normed, layer->gate_up, layer->gate_up_bias, p->gate_up, rows, size, 2 * inner, 0};
    const Product down = {
        p->active, layer->down, layer->down_bias, pass->hidden, rows, inner, size, 1};
    normalise_all(pass, pass->hidden, layer->after, p->normed);
    share(&wide, 0, panels, part, parts);
    share(&wide, panels, panels, part, parts);
    activate(p->gate_up, p->active, rows, inner, at, end);
    meet(parts);
    share(&down, 0, size / LANES, part, parts);
    meet(parts);
}

void decode(const void *what, int part, int parts) {
    const Pass *pass = what;
    const Decoder *m = pass->decoder;
    const Part p = part_of(pass, part, parts);
    const int rows = (int)pass->rows, end = first(rows, part + 1, parts);
    for (int i = first(rows, part, parts); i < end; i++)
        memcpy(pass->hidden + i * m->hidden, m->embedding + pass->tokens[i] * m->hidden,
               sizeof(float) * m->hidden);
    meet(parts);
    for (int l = 0; l < m->count; l++) {
        attend_layer(&p, m->layers + l);
        feed_forward(&p, m->layers + l);
    }
    if (part == 0) normalise_all(pass, pass->hidden, m->norm, pass->hidden);
}

int is_within(const Pass *pass) {
    const Decoder *m = pass->decoder;
    if (pass->start < 0 || pass->start + pass->rows > m->capacity) return 0;
    for (int64_t i = 0; i < pass->rows; i++) {
        if (pass->tokens[i] < 0 || pass->tokens[i] >= m->vocabulary) return 0;
        if (pass->positions[i] < 0 || pass->positions[i] >= m->capacity) return 0;
    }
    return 1;
}

/* 0, or 1 where a row lies outside of the embeddings or of the cache: nothing is done then. */
EXPORT int64_t run(const Pass *pass) {
    if (!is_within(pass)) return 1;
    together(decode, pass, (int)pass->threads);
    return 0;
}
