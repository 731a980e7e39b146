// The codes of a graph's values, and the bits that its matrix products state for them (core/stated_codes.h).
#pragma once

#include <string>

#include "ep/region/backend.h"
#include "ep/region/graph.h"

namespace lowbit::ep {

// Why the graph can never run: a node states more bits than the one that reads it. Empty where none does.
std::string CodesFault(const Graph& graph);

// The same graph, whose matrix products read no other codes than they state: where nothing proves it, their
// steps look themselves (Backend::LooksAtCodes), or a table before them leaves the low bits of each byte.
// Throws Error as CodesFault says. Doing it again changes nothing.
Graph WithStatedCodes(Graph graph, const Backend& backend);

}  // namespace lowbit::ep
