#pragma once

#include <stdint.h>

#include "growth.h"

/* What an answer may spend on drafts, in seconds by measured costs: its Python twin, and why, is
   candidate_budget.py. The costs are those of a stretch of the text. */
typedef struct {
    const double *prices;       /* [count]: of a step of 1, 2, ... candidates, never falling */
    double plain, enough, rate; /* of a plain step; of balance for a usual step of which nothing is
                                   accepted; tokens a second that the better brings on average */
    double share, least, sure, strict, most, weight; /* weight: of one step in the pace */
    int64_t count, usual, proof, asks;
    double balance, credit, pace; /* these five move */
    int64_t certain, length;
} Account;

/* What the next step may draft behind `length` tokens and a root of this probability goes into the
   growth; 0 for nothing. */
int allow(Account *a, Growth *g, int64_t length, double certainty);

/* A step that was allowed had so many nodes and gave so many tokens. */
void book(Account *a, int64_t nodes, int64_t tokens);
