// What an app does with a model that `lowbit export --to mobile` wrote: registers the ops of the static
// library, opens the .ort file, runs an image and prints the five best classes.
//
//   classify model.ort image.ppm [labels.txt]
//
// The image is a binary PPM or PGM, so that this file needs no decoder; an app has one. It is cropped to a
// square in the middle and scaled to the size of the model's input, which is [N, C, H, W] with 1 or 3
// channels: uint8 takes the pixels as they are, float takes them between 0 and 1, colours normalized as
// ImageNet's are.
#include <lowbit.h>
#include <onnxruntime_cxx_api.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <fstream>
#include <iterator>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

constexpr std::array<float, 3> kMean = {0.485f, 0.456f, 0.406f}, kDeviation = {0.229f, 0.224f, 0.225f};
constexpr size_t kBest = 5;
constexpr int64_t kLargestSide = 1 << 14;

// Pixels of interleaved channels.
struct Image {
  int64_t width = 0, height = 0, channels = 0;
  std::vector<uint8_t> pixels;
  float At(int64_t y, int64_t x, int64_t channel) const {
    return pixels[static_cast<size_t>((y * width + x) * channels + channel)];
  }
};

Image ReadImage(const char* path) {
  std::ifstream file(path, std::ios::binary);
  std::string magic;
  Image image;
  int64_t largest = 0;
  file >> magic >> image.width >> image.height >> largest;
  file.get();  // the one blank before the pixels
  image.channels = magic == "P6" ? 3 : 1;
  if (!file || (magic != "P5" && magic != "P6") || largest != 255 || image.width < 1 || image.height < 1 ||
      image.width > kLargestSide || image.height > kLargestSide)
    throw std::runtime_error(std::string(path) + ": expected a binary PPM or PGM of 8 bits without comments");
  image.pixels.resize(static_cast<size_t>(image.width * image.height * image.channels));
  file.read(reinterpret_cast<char*>(image.pixels.data()), static_cast<std::streamsize>(image.pixels.size()));
  if (!file) throw std::runtime_error(std::string(path) + ": ends too early");
  return image;
}

// The value at a place between pixels, bilinear.
float Sample(const Image& image, float y, float x, int64_t channel) {
  const auto clamped = [](float at, int64_t size) {
    return std::clamp(at, 0.0f, static_cast<float>(size - 1));
  };
  y = clamped(y, image.height);
  x = clamped(x, image.width);
  const auto top = static_cast<int64_t>(y), left = static_cast<int64_t>(x);
  const int64_t bottom = std::min(top + 1, image.height - 1), right = std::min(left + 1, image.width - 1);
  const float down = y - static_cast<float>(top), across = x - static_cast<float>(left);
  const float above = image.At(top, left, channel) * (1 - across) + image.At(top, right, channel) * across;
  const float below =
      image.At(bottom, left, channel) * (1 - across) + image.At(bottom, right, channel) * across;
  return above * (1 - down) + below * down;
}

// The square in the middle, scaled to height x width, as 0..255, channels first.
std::vector<float> Fit(const Image& image, int64_t channels, int64_t height, int64_t width) {
  const int64_t side = std::min(image.height, image.width);
  const float top = static_cast<float>(image.height - side) / 2,
              left = static_cast<float>(image.width - side) / 2;
  const float step_y = static_cast<float>(side) / static_cast<float>(height);
  const float step_x = static_cast<float>(side) / static_cast<float>(width);
  std::vector<float> out;
  out.reserve(static_cast<size_t>(channels * height * width));
  for (int64_t c = 0; c < channels; ++c) {
    for (int64_t y = 0; y < height; ++y) {
      for (int64_t x = 0; x < width; ++x) {
        const float at_y = top + (static_cast<float>(y) + 0.5f) * step_y - 0.5f;
        const float at_x = left + (static_cast<float>(x) + 0.5f) * step_x - 0.5f;
        out.push_back(Sample(image, at_y, at_x, std::min(c, image.channels - 1)));
      }
    }
  }
  return out;
}

// An input tensor and the memory that it stands in.
struct Input {
  std::vector<float> floats;
  std::vector<uint8_t> bytes;
  Ort::Value value{nullptr};
};

Input MakeInput(const Image& image, ONNXTensorElementDataType type, std::vector<int64_t> shape) {
  if (shape.size() == 4 && shape[0] < 0) shape[0] = 1;  // a batch of any size
  if (shape.size() != 4 || shape[0] != 1 || (shape[1] != 1 && shape[1] != 3) || shape[2] < 1 || shape[3] < 1)
    throw std::runtime_error("the model's input is no image [1, 1 or 3, height, width]");
  Input input;
  input.floats = Fit(image, shape[1], shape[2], shape[3]);
  const auto memory = Ort::MemoryInfo::CreateCpu(OrtArenaAllocator, OrtMemTypeDefault);
  if (type == ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8) {
    for (const float value : input.floats) input.bytes.push_back(static_cast<uint8_t>(value + 0.5f));
    input.value = Ort::Value::CreateTensor<uint8_t>(memory, input.bytes.data(), input.bytes.size(),
                                                    shape.data(), shape.size());
    return input;
  }
  if (type != ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT)
    throw std::runtime_error("the model's input is neither uint8 nor float");
  const size_t plane = static_cast<size_t>(shape[2] * shape[3]);
  for (size_t i = 0; i < input.floats.size(); ++i) {
    input.floats[i] /= 255;
    if (shape[1] == 3) input.floats[i] = (input.floats[i] - kMean[i / plane]) / kDeviation[i / plane];
  }
  input.value = Ort::Value::CreateTensor<float>(memory, input.floats.data(), input.floats.size(),
                                                shape.data(), shape.size());
  return input;
}

std::vector<float> Scores(const Ort::Value& output) {
  const auto info = output.GetTensorTypeAndShapeInfo();
  const size_t count = info.GetElementCount();
  switch (info.GetElementType()) {
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT:
      return {output.GetTensorData<float>(), output.GetTensorData<float>() + count};
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8:
      return {output.GetTensorData<uint8_t>(), output.GetTensorData<uint8_t>() + count};
    default:
      throw std::runtime_error("the model's output is neither uint8 nor float");
  }
}

std::vector<std::string> ReadLabels(const char* path) {
  std::ifstream file(path);
  std::vector<std::string> labels;
  for (std::string line; std::getline(file, line);) labels.push_back(line);
  return labels;
}

void Classify(const char* model, const char* picture, const std::vector<std::string>& labels) {
  const Ort::Env env;
  Ort::SessionOptions options;
  Ort::ThrowOnError(RegisterCustomOps(options, OrtGetApiBase()));
  Ort::Session session(env, model, options);

  const Ort::AllocatorWithDefaultOptions allocator;
  const auto input_name = session.GetInputNameAllocated(0, allocator);
  const auto output_name = session.GetOutputNameAllocated(0, allocator);
  const auto type = session.GetInputTypeInfo(0);
  const auto info = type.GetTensorTypeAndShapeInfo();
  const Input input = MakeInput(ReadImage(picture), info.GetElementType(), info.GetShape());

  const char* input_names[] = {input_name.get()};
  const char* output_names[] = {output_name.get()};
  const auto outputs = session.Run(Ort::RunOptions{}, input_names, &input.value, 1, output_names, 1);
  const std::vector<float> scores = Scores(outputs[0]);

  std::vector<size_t> order(scores.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return scores[a] > scores[b]; });
  order.resize(std::min(order.size(), kBest));
  for (const size_t each : order) {
    const char* label = each < labels.size() ? labels[each].c_str() : "";
    std::printf("%zu %g %s\n", each, static_cast<double>(scores[each]), label);
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3 && argc != 4) {
    std::fprintf(stderr, "usage: %s MODEL.ort IMAGE.ppm [LABELS.txt]\n", argv[0]);
    return 2;
  }
  try {
    Classify(argv[1], argv[2], argc == 4 ? ReadLabels(argv[3]) : std::vector<std::string>());
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  return 0;
}
