#pragma once

#include <stdint.h>

#include "decoder.h"
#include "heads.h"
#include "judge.h"

/* A whole step: a draft, one pass over it, its logits, what is accepted, and its keys and values
   moved to follow the text. The three jobs name the same rows; of a text that is only read the
   verdict is on the last one. */
typedef struct {
    Proposal *draft; /* NULL where the tokens are there already */
    Pass *pass;
    Verdict *verdict;
    const void *lm_panels;
    const float *lm_bias;
    int64_t *tokens, *positions; /* [rows] of all three; worked in */
    float *logits;               /* [rows, size], worked in */
    float *last;                 /* [hidden], out: the state after the last accepted row */
    int64_t is_text;             /* rows follow each other, and only the last one's logits count */
    double drafting, passing;    /* out: seconds of the draft; of the pass, logits included */
    double whole;                /* out: seconds of all */
} Step;

/* 0, or 1 where a row lies outside of the embeddings or of the cache: nothing is done then. A draft
   of the heads is within: what they guess from is no larger. */
int64_t step(Step *s);
