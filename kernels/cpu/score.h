// Scores over a vocabulary. See embedding.py for the meaning.
#pragma once
#include <cstdint>
#include <memory>

#include "product.h"
#include "team.h"

// Scores over a vocabulary, float32, for some rows of x.
struct Scores {
  const void* x;                // [any, inputs]
  const int64_t* rows;          // [num_rows]: which of them
  int64_t num_rows, num_best;   // the first num_best only ask for their best score
  Matrix matrix;
  const void* screen;  // the matrix as headrace_screen gives it, or null
  float* scores;       // [num_rows - num_best, outputs]
  int64_t* best;       // [num_best]: the output with the largest score, the lower one of equals
  uint8_t* finite;     // [num_rows]: whether all scores are
};

// What the threads have seen of the scores so far; for one call.
struct Scoring;
struct DropScoring { void operator()(Scoring* scoring) const; };
typedef std::unique_ptr<Scoring, DropScoring> ScoringPointer;
ScoringPointer new_scoring(const Scores& s, int threads);
void score(Member& member, const Scores& s, Scoring& scoring);

// What a thread reads first, as will_multiply has it.
void will_score(Member& member, const Scores& s, const Scoring& scoring);
