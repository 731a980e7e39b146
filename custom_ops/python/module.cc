// lowbit._native: the op set, the kernels and the packing for tests, tools and benchmarks. Everything here is
// a translation between Python objects and core/; converter/lowbit/_native.pyi documents the signatures.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "core/cpu/isa.h"
#include "core/cpu/kernel_table.h"
#include "core/cpu/operator.h"
#include "core/cpu/tune_cache.h"
#include "core/node_reader.h"
#include "core/packing.h"
#include "core/provider_options.h"
#include "core/schema.h"
#include "core/status.h"
#include "python/std_thread_pool.h"

namespace py = pybind11;

namespace lowbit {
namespace {

const OpSchema& SchemaOf(const std::string& op) {
  const OpSchema* schema = FindOpSchema(op);
  Require(schema != nullptr, "no op is named '", op, "' in domain ", kDomain);
  return *schema;
}

const char* RuleName(TypeRule rule) {
  switch (rule) {
    case TypeRule::kCodes:
      return "codes";
    case TypeRule::kCodesOrFloat:
      return "codes_or_float";
    case TypeRule::kUInt8:
      return "uint8";
    case TypeRule::kInt32:
      return "int32";
    case TypeRule::kFloat:
      return "float";
  }
  return "";
}

const char* KindName(AttributeKind kind) {
  static constexpr const char* kNames[] = {"int", "float", "string", "ints", "floats"};
  return kNames[static_cast<size_t>(kind)];
}

const char* ElementName(ElementType type) {
  static constexpr const char* kNames[] = {"uint8", "int8", "int32", "float32"};
  return kNames[static_cast<size_t>(type)];
}

py::dict DescribeInput(const InputSchema& input) {
  py::dict out;
  out["name"] = input.name;
  out["type"] = RuleName(input.type);
  out["constant"] = input.constant;
  out["optional"] = input.optional;
  out["variadic"] = input.variadic;
  out["doc"] = input.doc;
  return out;
}

py::dict DescribeAttribute(const AttributeSchema& attribute) {
  py::dict out;
  out["name"] = attribute.name;
  out["kind"] = KindName(attribute.kind);
  out["required"] = attribute.required;
  out["default"] = attribute.required
                       ? py::none()
                       : std::visit([](const auto& value) -> py::object { return py::cast(value); },
                                    attribute.default_value);
  out["doc"] = attribute.doc;
  return out;
}

py::list Schemas() {
  py::list out;
  for (const OpSchema& schema : OpSchemas()) {
    py::list inputs, attributes;
    for (const InputSchema& input : schema.inputs) inputs.append(DescribeInput(input));
    for (const AttributeSchema& attribute : schema.attributes)
      attributes.append(DescribeAttribute(attribute));
    py::dict op;
    op["name"] = schema.name;
    op["summary"] = schema.summary;
    op["definition"] = schema.definition;
    op["inputs"] = inputs;
    op["attributes"] = attributes;
    op["output_type"] = RuleName(schema.output_type);
    op["output_doc"] = schema.output_doc;
    out.append(op);
  }
  return out;
}

// ---- attributes and tensors

template <typename T>
std::vector<T> NumberList(const py::handle& value) {
  std::vector<T> out;
  for (const py::handle item : value) out.push_back(py::cast<T>(item));
  return out;
}

// Empty where the value is not of the kind.
std::optional<AttributeValue> CastTo(AttributeKind kind, const py::handle& value) {
  try {
    switch (kind) {
      case AttributeKind::kInt:
        return py::cast<int64_t>(value);
      case AttributeKind::kFloat:
        return py::cast<float>(value);
      case AttributeKind::kString:
        return py::cast<std::string>(value);
      case AttributeKind::kInts:
        return NumberList<int64_t>(value);
      case AttributeKind::kFloats:
        return NumberList<float>(value);
    }
  } catch (const py::cast_error&) {
    return std::nullopt;
  } catch (const py::error_already_set&) {  // not iterable
    return std::nullopt;
  }
  return std::nullopt;
}

AttributeValue AttributeFrom(const AttributeSchema& attribute, const py::handle& value) {
  std::optional<AttributeValue> cast = CastTo(attribute.kind, value);
  if (!cast) {
    Fail("attribute '", attribute.name, "' must be of kind ", KindName(attribute.kind), ", got ",
         py::cast<std::string>(py::repr(value)));
  }
  return std::move(*cast);
}

AttributeMap AttributesFrom(const OpSchema& schema, const py::dict& given) {
  AttributeMap out;
  for (const auto& [key, value] : given) {
    const std::string name = py::cast<std::string>(key);
    const AttributeSchema* found = FindAttribute(schema, name);
    Require(found != nullptr, schema.name, ": unknown attribute '", name, "'");
    out.emplace(name, AttributeFrom(*found, value));
  }
  return out;
}

ElementType ElementTypeOf(const py::array& array) {
  if (array.dtype().equal(py::dtype::of<uint8_t>())) return ElementType::kUInt8;
  if (array.dtype().equal(py::dtype::of<int8_t>())) return ElementType::kInt8;
  if (array.dtype().equal(py::dtype::of<int32_t>())) return ElementType::kInt32;
  if (array.dtype().equal(py::dtype::of<float>())) return ElementType::kFloat;
  Fail("an input has dtype ", py::cast<std::string>(py::str(array.dtype())),
       ", expected uint8, int8, int32 or float32");
}

size_t IndexOfVariadic(const OpSchema& schema) {
  return schema.inputs.back().variadic ? schema.inputs.size() - 1 : schema.inputs.size();
}

// The inputs of one call: arrays kept alive, viewed as tensors. Trailing absent inputs may be left out.
struct Feeds {
  std::vector<py::array> arrays;
  std::vector<std::optional<ConstTensor>> tensors, constants;  // fed at run time, read at creation
  std::vector<bool> present;
};

Feeds FeedsFrom(const OpSchema& schema, const py::list& inputs) {
  Feeds feeds;
  const size_t count = std::max<size_t>(inputs.size(), schema.inputs.size());
  feeds.tensors.resize(count);
  feeds.constants.resize(count);
  feeds.present.resize(count);
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (inputs[i].is_none()) continue;
    Require(i < schema.inputs.size() || IndexOfVariadic(schema) < schema.inputs.size(), schema.name, ": ",
            inputs.size(), " inputs, expected at most ", schema.inputs.size());
    py::array array = py::array::ensure(inputs[i], py::array::c_style);
    Require(static_cast<bool>(array), schema.name, ": input ", i, " is not an array");
    ConstTensor tensor{ElementTypeOf(array), {array.shape(), array.shape() + array.ndim()}, array.data()};
    const bool constant = schema.inputs[std::min(i, schema.inputs.size() - 1)].constant;
    (constant ? feeds.constants : feeds.tensors)[i] = std::move(tensor);
    feeds.present[i] = true;
    feeds.arrays.push_back(std::move(array));
  }
  return feeds;
}

OperatorOptions OptionsFrom(const std::optional<std::string>& isa, const std::optional<std::string>& kernel,
                            bool reference, const Feeds& feeds) {
  OperatorOptions options;
  options.isa = DefaultIsa();
  if (isa) {
    const std::optional<Isa> level = IsaFromName(*isa);
    Require(level.has_value(), "isa is '", *isa, "', expected one of ", IsaNames());
    options.isa = *level;
  }
  options.kernel = kernel.value_or("");
  options.use_reference = reference;
  options.warn = [](const std::string& warning) {
    if (PyErr_WarnEx(PyExc_RuntimeWarning, warning.c_str(), 1) != 0) throw py::error_already_set();
  };
  if (!feeds.tensors.empty() && feeds.tensors[0]) options.x_shape = feeds.tensors[0]->shape;
  return options;
}

struct Node {
  Feeds feeds;
  std::unique_ptr<Operator> op;
};

// `x_shape` is what a model states of input 0's shape, -1 where it does not; empty: all of it. Who measures
// kernels says that x has the stated bits, so that nothing else takes time.
Node MakeNode(const std::string& name, const py::dict& attributes, const py::list& inputs,
              const std::optional<std::string>& isa, const std::optional<std::string>& kernel, bool reference,
              size_t threads = 0, const std::optional<std::vector<int64_t>>& x_shape = std::nullopt,
              bool x_has_stated_bits = false) {
  const OpSchema& schema = SchemaOf(name);
  Node node{FeedsFrom(schema, inputs), nullptr};
  const AttributeMap map = AttributesFrom(schema, attributes);
  OperatorOptions options = OptionsFrom(isa, kernel, reference, node.feeds);
  options.threads = static_cast<int>(threads);
  options.x_has_stated_bits = x_has_stated_bits;
  if (x_shape) options.x_shape = *x_shape;
  node.op = CreateOperator(schema, map, node.feeds.constants, node.feeds.present, options);
  return node;
}

py::array MakeOutput(const Node& node) {
  const std::vector<int64_t> shape = node.op->OutputShape(node.feeds.tensors);
  return py::array(py::dtype(ElementName(node.op->OutputType())), shape);
}

// ---- the module's functions

// More threads than any machine has; beyond that, starting them would fail halfway.
void CheckThreads(size_t threads) {
  constexpr size_t kMaxThreads = 1024;
  Require(threads >= 1 && threads <= kMaxThreads, "threads is ", threads, ", expected 1..", kMaxThreads);
}

py::array Run(const std::string& op, const py::dict& attributes, const py::list& inputs,
              const std::optional<std::string>& isa, const std::optional<std::string>& kernel, bool reference,
              size_t threads, double task_cycles) {
  CheckThreads(threads);
  Require(task_cycles >= 1, "task_cycles is ", task_cycles, ", expected at least 1");
  const Node node = MakeNode(op, attributes, inputs, isa, kernel, reference, threads);
  py::array y = MakeOutput(node);
  void* data = y.mutable_data();
  const py::gil_scoped_release release;
  StdThreadPool pool(threads, task_cycles);
  node.op->Run(node.feeds.tensors, data, pool);
  return y;
}

py::dict Plan(const std::string& op, const py::dict& attributes, const py::list& inputs,
              const std::optional<std::string>& isa, const std::optional<std::string>& kernel, bool reference,
              size_t threads, const std::optional<std::vector<int64_t>>& x_shape) {
  if (threads != 0) CheckThreads(threads);
  const Node node = MakeNode(op, attributes, inputs, isa, kernel, reference, threads, x_shape);
  const OperatorPlan plan = node.op->Plan(node.feeds.tensors);
  py::dict out;
  out["kernel"] = plan.kernel;
  out["workspace_bytes"] = plan.workspace_bytes;
  out["packed_bytes"] = plan.packed_bytes;
  out["refused"] = plan.refused;
  py::list candidates;
  for (const OperatorPlan::Candidate& each : plan.candidates) {
    py::dict candidate;
    candidate["kernel"] = each.kernel;
    candidate["cycles"] = each.cycles;
    candidates.append(candidate);
  }
  out["candidates"] = candidates;
  out["tuned"] = plan.tuned;
  out["tune_key"] = plan.tune_key;
  return out;
}

double SecondsOf(const Node& node, void* y, ThreadPool& pool, size_t runs) {
  const auto start = std::chrono::steady_clock::now();
  for (size_t i = 0; i < runs; ++i) node.op->Run(node.feeds.tensors, y, pool);
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

py::array_t<double> Time(const std::string& op, const py::dict& attributes, const py::list& inputs,
                         const std::optional<std::string>& isa, const std::optional<std::string>& kernel,
                         bool reference, size_t threads, size_t repeats) {
  CheckThreads(threads);
  const Node node = MakeNode(op, attributes, inputs, isa, kernel, reference, threads, std::nullopt, true);
  py::array y = MakeOutput(node);
  void* data = y.mutable_data();
  py::array_t<double> seconds(static_cast<py::ssize_t>(repeats));
  double* out = seconds.mutable_data();
  {
    const py::gil_scoped_release release;
    StdThreadPool pool(threads);
    for (size_t i = 0; i < repeats; ++i) out[i] = SecondsOf(node, data, pool, 1);
  }
  return seconds;
}

// Op, attributes, inputs, and a kernel to force or none.
using Runner = std::tuple<std::string, py::dict, py::list, std::optional<std::string>>;

py::array_t<double> Race(const std::vector<Runner>& runners, const std::optional<std::string>& isa,
                         size_t threads, size_t rounds, double turn_seconds) {
  CheckThreads(threads);
  Require(rounds <= 100000 && turn_seconds >= 0 && turn_seconds <= 10,
          "expected at most 100000 rounds and turns of 0..10 seconds");
  std::vector<Node> nodes;
  std::vector<py::array> outputs;
  for (const auto& [op, attributes, inputs, kernel] : runners) {
    nodes.push_back(MakeNode(op, attributes, inputs, isa, kernel, false, threads, std::nullopt, true));
    outputs.push_back(MakeOutput(nodes.back()));
  }
  std::vector<void*> ys;
  ys.reserve(outputs.size());
  for (py::array& output : outputs) ys.push_back(output.mutable_data());
  py::array_t<double> seconds({static_cast<py::ssize_t>(nodes.size()), static_cast<py::ssize_t>(rounds)});
  double* out = seconds.mutable_data();
  const py::gil_scoped_release release;
  StdThreadPool pool(threads);
  std::vector<size_t> runs;
  for (size_t i = 0; i < nodes.size(); ++i) {
    const double warm = std::min(SecondsOf(nodes[i], ys[i], pool, 1), SecondsOf(nodes[i], ys[i], pool, 1));
    runs.push_back(std::max<size_t>(1, static_cast<size_t>(turn_seconds / std::max(warm, 1e-7))));
  }
  for (size_t round = 0; round < rounds; ++round) {
    for (size_t turn = 0; turn < nodes.size(); ++turn) {
      // Whoever goes first would always meet the other's cache contents: the order alternates.
      const size_t i = round % 2 == 0 ? turn : nodes.size() - 1 - turn;
      SecondsOf(nodes[i], ys[i], pool, 1);  // refills the caches
      out[i * rounds + round] = SecondsOf(nodes[i], ys[i], pool, runs[i]) / static_cast<double>(runs[i]);
    }
  }
  return seconds;
}

py::tuple Infer(const std::string& op, const py::dict& attributes, const py::list& shapes,
                const std::vector<bool>& present) {
  const OpSchema& schema = SchemaOf(op);
  const size_t count = std::max<size_t>(shapes.size(), schema.inputs.size());
  std::vector<Shape> inputs(count);
  for (size_t i = 0; i < shapes.size(); ++i) {
    if (shapes[i].is_none()) continue;
    inputs[i].emplace();
    for (const py::handle dim : shapes[i]) {
      if (dim.is_none()) {
        inputs[i]->push_back({});
      } else if (py::isinstance<py::str>(dim)) {
        inputs[i]->push_back({std::nullopt, py::cast<std::string>(dim)});
      } else {
        inputs[i]->push_back({py::cast<int64_t>(dim), {}});
      }
    }
  }
  std::vector<bool> flags = present;
  flags.resize(count);
  const InferredOutput y = InferOutput(schema, AttributesFrom(schema, attributes), inputs, flags);
  if (!y.shape) return py::make_tuple(py::none(), ElementName(y.type));
  py::list dims;
  for (const Dim& dim : *y.shape) {
    if (dim.value) {
      dims.append(*dim.value);
    } else if (!dim.symbol.empty()) {
      dims.append(dim.symbol);
    } else {
      dims.append(py::none());
    }
  }
  return py::make_tuple(dims, ElementName(y.type));
}

py::dict DescribeKernel(const KernelInfo& kernel) {
  py::dict entry;
  entry["name"] = kernel.name;
  entry["op"] = kernel.op;
  entry["algorithm"] = kernel.algorithm;
  entry["isa"] = IsaName(kernel.isa);
  entry["x_bits_max"] = kernel.x_bits_max;
  entry["w_bits_max"] = kernel.w_bits_max;
  entry["note"] = kernel.note;
  return entry;
}

py::list KernelTable(bool elsewhere) {
  py::list out;
  if (elsewhere) {
    for (const KernelInfo& kernel : KernelsElsewhere()) out.append(DescribeKernel(kernel));
  } else {
    for (const KernelRow& row : ConvKernelTable()) out.append(DescribeKernel(row));
  }
  return out;
}

py::list EpOptionTable() {
  py::list out;
  for (const ep::OptionInfo& option : ep::Options()) {
    py::dict entry;
    entry["name"] = option.name;
    entry["values"] = option.values;
    entry["default"] = option.default_value;
    entry["doc"] = option.doc;
    out.append(entry);
  }
  return out;
}

py::list ParseTunes(const py::bytes& text) {
  py::list out;
  for (const auto& [key, kernel] : ParseTuneCache(std::string_view(text)))
    out.append(py::make_tuple(key.first, key.second, kernel));
  return out;
}

py::bytes FormatTunes(const std::vector<std::tuple<std::string, int, std::string>>& entries) {
  TuneEntries sorted;
  for (const auto& [key, threads, kernel] : entries) sorted.insert_or_assign({key, threads}, kernel);
  return py::bytes(FormatTuneCache(sorted));
}

std::vector<std::string> IsaLevels() {
  std::vector<std::string> out;
  for (const Isa isa : MachineIsaLevels()) out.emplace_back(IsaName(isa));
  return out;
}

py::array_t<uint8_t> PackWeights(const py::array_t<int64_t, py::array::c_style | py::array::forcecast>& codes,
                                 int bits) {
  Require(bits >= 1 && bits <= 8, "bits is ", bits, ", expected 1..8");
  Require(codes.ndim() == 2, "codes have rank ", codes.ndim(), ", expected [rows, k]");
  const int64_t rows = codes.shape(0), k = codes.shape(1);
  std::vector<uint8_t> bytes(static_cast<size_t>(rows * k));
  const int64_t lo = -(int64_t{1} << (bits - 1)), hi = (int64_t{1} << bits) - 1;  // signed and unsigned codes
  for (size_t i = 0; i < bytes.size(); ++i) {
    const int64_t code = codes.data()[i];
    Require(code >= lo && code <= hi, "code ", code, " does not fit ", bits, " bits");
    bytes[i] = static_cast<uint8_t>(code);
  }
  py::array_t<uint8_t> packed(rows * PackedRowBytes(k, bits));
  PackRows(bytes, rows, k, bits, {packed.mutable_data(), static_cast<size_t>(packed.size())});
  return packed;
}

py::array UnpackWeights(const py::array_t<uint8_t, py::array::c_style>& packed, int64_t rows, int64_t k,
                        int bits, bool is_signed) {
  Require(rows >= 0 && k >= 0 && rows <= kMaxAttribute && k <= kMaxAttribute, "rows x k is ", rows, " x ", k);
  Require(bits >= 1 && bits <= 8, "bits is ", bits, ", expected 1..8");
  Require(packed.size() == rows * PackedRowBytes(k, bits), "expected ", rows * PackedRowBytes(k, bits),
          " bytes, got ", packed.size());
  py::array codes(py::dtype(is_signed ? "int8" : "uint8"), std::vector<int64_t>{rows, k});
  UnpackRows({packed.data(), static_cast<size_t>(packed.size())}, rows, k, bits, is_signed,
             {static_cast<uint8_t*>(codes.mutable_data()), static_cast<size_t>(codes.size())});
  return codes;
}

}  // namespace
}  // namespace lowbit

PYBIND11_MODULE(_native, m) {
  using namespace lowbit;
  m.doc() = "The op set, kernels and packing of lowbit, for tests, tools and benchmarks.";
  m.attr("version") = LOWBIT_VERSION;
  m.attr("required_api") = LOWBIT_ORT_MINIMUM_API;
  m.attr("DOMAIN") = kDomain;
  m.attr("DOMAIN_VERSION") = kDomainVersion;
  py::register_exception<Error>(m, "LowBitError", PyExc_ValueError);

  m.def("schemas", &Schemas);
  m.def("infer_output", &Infer, py::arg("op"), py::arg("attrs"), py::arg("shapes"), py::arg("present"));
  m.def("isa_levels", &IsaLevels);
  m.def("default_isa", [] { return IsaName(DefaultIsa()); });
  m.def("kernel_table", &KernelTable, py::arg("elsewhere") = false);
  m.def("ep_options", &EpOptionTable);
  m.def("run", &Run, py::arg("op"), py::arg("attrs"), py::arg("inputs"), py::kw_only(),
        py::arg("isa") = py::none(), py::arg("kernel") = py::none(), py::arg("reference") = false,
        py::arg("threads") = 1, py::arg("task_cycles") = kTaskCycles);
  m.def("plan", &Plan, py::arg("op"), py::arg("attrs"), py::arg("inputs"), py::kw_only(),
        py::arg("isa") = py::none(), py::arg("kernel") = py::none(), py::arg("reference") = false,
        py::arg("threads") = 0, py::arg("x_shape") = py::none());
  m.def("time", &Time, py::arg("op"), py::arg("attrs"), py::arg("inputs"), py::kw_only(),
        py::arg("isa") = py::none(), py::arg("kernel") = py::none(), py::arg("reference") = false,
        py::arg("threads") = 1, py::arg("repeats") = 50);
  m.def("race", &Race, py::arg("runners"), py::kw_only(), py::arg("isa") = py::none(), py::arg("threads") = 1,
        py::arg("rounds") = 20, py::arg("turn_seconds") = 1e-3);
  m.def("tune_cache_path", &TuneCachePath);
  m.def("tune_cache_enabled", &TuneCacheEnabled);
  m.def("parse_tune_cache", &ParseTunes, py::arg("text"));
  m.def("format_tune_cache", &FormatTunes, py::arg("entries"));
  m.def("pack_weights", &PackWeights, py::arg("codes"), py::arg("bits"));
  m.def("unpack_weights", &UnpackWeights, py::arg("packed"), py::arg("rows"), py::arg("k"), py::arg("bits"),
        py::arg("signed"));
}
