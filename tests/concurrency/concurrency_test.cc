// Eight threads on two sets of operators that share their weights' content, as eight callers of two sessions
// of one model do. Built with ThreadSanitizer by `make test FULL=1`. Every result must equal the one that a
// single thread computed before. Meanwhile other operators are created and destroyed, image sizes alternate
// (so that plans per shape come and go), and half of the callers bring a thread pool of their own.
#include <atomic>
#include <cstdint>
#include <exception>
#include <functional>
#include <iostream>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "core/cpu/isa.h"
#include "core/cpu/operator.h"
#include "core/schema.h"
#include "core/thread_pool.h"

namespace {

using lowbit::ConstTensor;
using lowbit::ElementType;

// Starts its threads anew for every loop: slow, and the hardest on what the loop's body shares.
class FreshThreadPool final : public lowbit::ThreadPool {
 public:
  explicit FreshThreadPool(size_t threads) : threads_(threads) {}
  void ParallelFor(size_t count, const std::function<void(size_t)>& fn) override {
    std::atomic<size_t> next{0};
    const auto work = [&] {
      for (size_t i = next++; i < count; i = next++) fn(i);
    };
    std::vector<std::thread> helpers;
    for (size_t i = 1; i < threads_ && i < count; ++i) helpers.emplace_back(work);
    work();
    for (auto& helper : helpers) helper.join();
  }

 private:
  size_t threads_;
};

// The constants of one node, by input name; owns their memory.
class Constants {
 public:
  void AddFloat(const std::string& name, const std::vector<float>& values) {
    Add(name, ElementType::kFloat, values.data(), values.size(), values.size() == 1);
  }
  void AddInt(const std::string& name, const std::vector<int32_t>& values) {
    Add(name, ElementType::kInt32, values.data(), values.size(), values.size() == 1);
  }
  void AddBytes(const std::string& name, const std::vector<uint8_t>& values) {
    Add(name, ElementType::kUInt8, values.data(), values.size(), false);
  }

  // One entry per schema input; activations and absent inputs are nullopt.
  std::vector<std::optional<ConstTensor>> For(const lowbit::OpSchema& schema) const {
    std::vector<std::optional<ConstTensor>> out;
    for (const auto& input : schema.inputs) {
      const auto it = tensors_.find(input.name);
      if (it == tensors_.end()) {
        out.emplace_back();
        continue;
      }
      out.push_back(ConstTensor{it->second.type, it->second.shape, it->second.bytes.data()});
    }
    return out;
  }

 private:
  struct Tensor {
    ElementType type;
    std::vector<int64_t> shape;
    std::vector<uint8_t> bytes;
  };
  void Add(const std::string& name, ElementType type, const void* data, size_t count, bool scalar) {
    const auto* bytes = static_cast<const uint8_t*>(data);
    auto shape = scalar ? std::vector<int64_t>{} : std::vector<int64_t>{static_cast<int64_t>(count)};
    tensors_[name] = Tensor{type, std::move(shape),
                            std::vector<uint8_t>(bytes, bytes + count * lowbit::ElementSize(type))};
  }
  std::map<std::string, Tensor> tensors_;
};

// A node of the test network: how to create it, and the images it is run on.
struct Node {
  const lowbit::OpSchema* schema = nullptr;
  lowbit::AttributeMap attributes;
  Constants constants;
  std::vector<bool> present;
  std::vector<std::vector<int64_t>> image_shapes;

  std::unique_ptr<lowbit::Operator> Create(lowbit::Isa isa) const {
    lowbit::OperatorOptions options;
    options.isa = isa;
    return lowbit::CreateOperator(*schema, attributes, constants.For(*schema), present, options);
  }
};

std::vector<uint8_t> RandomBytes(size_t count, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<uint8_t> out(count);
  for (auto& byte : out) byte = static_cast<uint8_t>(random());
  return out;
}

Node Convolution(int64_t channels, int64_t out_channels, int64_t kernel, int64_t group, int64_t w_bits,
                 uint32_t seed) {
  Node node;
  node.schema = lowbit::FindOpSchema("LowBitConv");
  const int64_t k = kernel * kernel * channels / group;
  node.attributes = {{"kernel_shape", std::vector<int64_t>{kernel, kernel}},
                     {"pads", std::vector<int64_t>(4, kernel / 2)},
                     {"in_channels", channels},
                     {"out_channels", out_channels},
                     {"group", group},
                     {"w_bits", w_bits},
                     {"w_encoding", std::string("signed")}};
  node.constants.AddBytes("w", RandomBytes(static_cast<size_t>(out_channels * ((k * w_bits + 7) / 8)), seed));
  node.constants.AddFloat("x_scale", {0.02f});
  node.constants.AddInt("x_zero_point", {117});
  node.constants.AddFloat("w_scale", std::vector<float>(static_cast<size_t>(out_channels), 0.01f));
  node.constants.AddInt("w_zero_point", {0});
  node.constants.AddFloat("y_scale", {0.25f});
  node.constants.AddInt("y_zero_point", {128});
  for (const auto& input : node.schema->inputs) {
    const std::string name = input.name;
    node.present.push_back(!input.optional || name == "y_scale" || name == "y_zero_point");
  }
  node.image_shapes = {{1, 9, 11, channels}, {2, 16, 16, channels}, {1, 1, 5, channels}};
  return node;
}

std::vector<uint8_t> RunOn(const Node& node, const lowbit::Operator& op, const std::vector<int64_t>& shape,
                           lowbit::ThreadPool& pool) {
  size_t count = 1;
  for (const int64_t dim : shape) count *= static_cast<size_t>(dim);
  const auto image = RandomBytes(count, static_cast<uint32_t>(count));
  std::vector<std::optional<ConstTensor>> inputs(node.schema->inputs.size());
  inputs[0] = ConstTensor{ElementType::kUInt8, shape, image.data()};
  size_t bytes = lowbit::ElementSize(op.OutputType());
  for (const int64_t dim : op.OutputShape(inputs)) bytes *= static_cast<size_t>(dim);
  std::vector<uint8_t> y(bytes);
  op.Run(inputs, y.data(), pool);
  return y;
}

// Returns the number of results that differ from the single-threaded ones.
int Check(lowbit::Isa isa) {
  const std::vector<Node> nodes = {
      Convolution(32, 48, 3, 1, 8, 1),  Convolution(64, 64, 1, 1, 4, 2), Convolution(3, 16, 7, 1, 8, 3),
      Convolution(48, 48, 3, 48, 8, 4), Convolution(32, 32, 3, 4, 2, 5),
  };
  using Session = std::vector<std::unique_ptr<lowbit::Operator>>;
  std::vector<Session> sessions(2);
  for (auto& session : sessions) {
    for (const auto& node : nodes) session.push_back(node.Create(isa));
  }

  lowbit::InlineThreadPool inline_pool;
  std::vector<std::vector<std::vector<uint8_t>>> expected;  // [node][image]
  for (const auto& node : nodes) {
    const auto op = node.Create(isa);
    auto& results = expected.emplace_back();
    for (const auto& shape : node.image_shapes) results.push_back(RunOn(node, *op, shape, inline_pool));
  }

  std::atomic<int> wrong{0};
  const auto caller = [&](size_t index) {
    FreshThreadPool own_pool(3);
    lowbit::InlineThreadPool no_pool;
    lowbit::ThreadPool& pool = index % 2 == 0 ? static_cast<lowbit::ThreadPool&>(own_pool) : no_pool;
    const Session& session = sessions[index % sessions.size()];
    for (size_t round = 0; round < 6; ++round) {
      for (size_t n = 0; n < nodes.size(); ++n) {
        const size_t image = (index + round + n) % nodes[n].image_shapes.size();
        if (RunOn(nodes[n], *session[n], nodes[n].image_shapes[image], pool) != expected[n][image]) ++wrong;
      }
      // A third session of the same model appears and disappears.
      const auto& node = nodes[(index + round) % nodes.size()];
      const auto passing = node.Create(isa);
      if (RunOn(node, *passing, node.image_shapes[0], no_pool) !=
          expected[(index + round) % nodes.size()][0]) {
        ++wrong;
      }
    }
  };
  std::vector<std::thread> callers;
  for (size_t i = 0; i < 8; ++i) callers.emplace_back(caller, i);
  for (auto& thread : callers) thread.join();
  return wrong;
}

}  // namespace

int main() {
  int failed = 0;
  try {
    for (const lowbit::Isa isa : lowbit::MachineIsaLevels()) {
      const int wrong = Check(isa);
      std::cout << "concurrency at " << lowbit::IsaName(isa) << ": " << wrong << " results differ\n";
      failed += wrong != 0;
    }
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
    failed = 1;
  }
  return failed == 0 ? 0 : 1;
}
