// Runs a converted model from C++: an ordinary ONNX Runtime program that registers one library.
//
//   c++ -std=c++20 register_yourself.cc -I<onnxruntime>/include -L<onnxruntime>/lib -lonnxruntime -o run
//   ./run /path/to/liblowbit.so model.lowbit.onnx
//
// The path of the library: python -c "import lowbit; print(lowbit.get_library_path())"
#include <onnxruntime_cxx_api.h>

#include <cstdint>
#include <exception>
#include <functional>
#include <iostream>
#include <numeric>
#include <vector>

namespace {

void Run(const char* library, const char* model) {
  Ort::Env env;
  Ort::SessionOptions options;
  options.RegisterCustomOpsLibrary(library);
  Ort::Session session(env, model, options);

  Ort::AllocatorWithDefaultOptions allocator;
  const auto input_name = session.GetInputNameAllocated(0, allocator);
  const auto output_name = session.GetOutputNameAllocated(0, allocator);
  const auto input_type = session.GetInputTypeInfo(0);
  auto shape = input_type.GetTensorTypeAndShapeInfo().GetShape();
  for (auto& dim : shape) {
    if (dim < 0) dim = 1;  // dynamic
  }
  const int64_t size = std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>());
  std::vector<float> image(static_cast<size_t>(size), 0.5f);

  const auto memory = Ort::MemoryInfo::CreateCpu(OrtArenaAllocator, OrtMemTypeDefault);
  const auto input =
      Ort::Value::CreateTensor<float>(memory, image.data(), image.size(), shape.data(), shape.size());
  const char* input_names[] = {input_name.get()};
  const char* output_names[] = {output_name.get()};
  const auto outputs = session.Run(Ort::RunOptions{}, input_names, &input, 1, output_names, 1);
  std::cout << output_name.get() << ": " << outputs[0].GetTensorTypeAndShapeInfo().GetElementCount()
            << " values\n";
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) {
    std::cerr << "usage: " << argv[0] << " LIBRARY MODEL\n";
    return 2;
  }
  try {
    Run(argv[1], argv[2]);
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
    return 1;
  }
  return 0;
}
