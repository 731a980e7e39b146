// Writes what the fuzzers begin with, into the folders node, compiled and tune_file of the one that is named.
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <random>

#include "core/packed_weights.h"
#include "core/tune_file.h"
#include "ep/region/bytes.h"
#include "ep/region/program.h"
#include "tests/fuzz/shape_backend.h"

namespace lowbit::ep {
namespace {

void Write(const std::filesystem::path& path, std::span<const uint8_t> bytes) {
  std::filesystem::create_directories(path.parent_path());
  std::ofstream file(path, std::ios::binary);
  file.write(reinterpret_cast<const char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
  Require(file.good(), path.string(), " cannot be written");
}

std::span<const uint8_t> Bytes(std::string_view text) {
  return {reinterpret_cast<const uint8_t*>(text.data()), text.size()};
}

// A table, its maximum over windows, and a transpose.
Graph SmallGraph(const std::vector<uint8_t>& table) {
  Graph graph;
  for (const char* name : {"x", "table", "codes", "pooled", "y"}) {
    Value value;
    value.name = name;
    value.type = ElementType::kUInt8;
    graph.values.push_back(std::move(value));
  }
  graph.values[1].constant = ConstTensor{ElementType::kUInt8, {256}, table.data()};
  graph.values[1].dims = {{256}};
  const auto node = [&](const char* op, const char* domain, std::vector<ValueId> inputs, ValueId y,
                        AttributeMap map) {
    Node made;
    made.name = op;
    made.op = op;
    made.domain = domain;
    made.since_version = 13;
    made.inputs = std::move(inputs);
    made.outputs = {y};
    made.attributes = std::move(map);
    graph.nodes.push_back(std::move(made));
  };
  node("LowBitLookup", kDomain, {0, 1}, 2, {});
  node("LowBitMaxPool", kDomain, {2}, 3,
       {{"kernel_shape", std::vector<int64_t>{2, 2}}, {"strides", std::vector<int64_t>{2, 2}}});
  node("Transpose", "", {3}, 4, {{"perm", std::vector<int64_t>{0, 3, 1, 2}}});
  graph.inputs = {0};
  graph.outputs = {4};
  return graph;
}

void WriteSeeds(const std::filesystem::path& folder) {
  const auto backend = std::make_shared<ShapeBackend>();
  const std::vector<uint8_t> table(256, 7);
  const Graph graph = SmallGraph(table);
  const std::vector<uint8_t> blob = SaveCompiled(graph, *Program::Compile(graph, backend), *backend);
  const size_t before = 32 + sizeof(uint64_t) + backend->Fingerprint().size();  // header and fingerprint
  Write(folder / "compiled" / "small", std::span(blob).subspan(before));

  const TuneEntries entries{{{"conv i64 o64", 1}, "igemm_u8s8"}, {{"conv i64 o64", 2}, "bitserial"}};
  const std::string file = FormatTuneFile({"a machine", "a build"}, entries);
  Write(folder / "tune_file" / "whole", Bytes(file));
  Write(folder / "tune_file" / "entries", Bytes("1\tconv i64 o64\tigemm_u8s8\n2\tconv i64 o64\tbitserial\n"));

  std::mt19937 random(1);
  for (int i = 0; i < 32; ++i) {
    std::vector<uint8_t> bytes(200 + random() % 800);
    for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random());
    Write(folder / "node" / std::to_string(i), bytes);
  }
}

}  // namespace
}  // namespace lowbit::ep

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: lowbit_fuzz_seeds FOLDER\n");
    return 2;
  }
  lowbit::ep::WriteSeeds(argv[1]);
  return 0;
}
