// Which outputs of a matrix can have a row's largest score, from a copy of it in 8 bits. See screen.cpp.
#pragma once
#include <cstdint>
#include <memory>

#include "score.h"
#include "team.h"

// What one call knows of the rows that only ask for their best; null where they are better scored without a screen.
struct Screening;
struct DropScreening { void operator()(Screening* screening) const; };
typedef std::unique_ptr<Screening, DropScreening> ScreeningPointer;
ScreeningPointer new_screening(const Scores& s, int threads);

// Finds the best of those rows, all but a few; of which, says `settled` once this is over.
void screen(Member& member, const Scores& s, Screening& screening);
bool settled(const Screening& screening, int64_t row);
