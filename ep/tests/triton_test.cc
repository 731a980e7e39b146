// A host that knows custom-op libraries and no plugin providers: it makes the calls of Triton's onnxruntime
// backend (the loader and the model state of triton-inference-server/onnxruntime_backend) in their
// order, as for two instances of a model on the CPU whose dynamic batcher makes batches of several sizes.
//
// Arguments: the library of ONNX Runtime, that of lowbit (`op_library_filename`), the model, a file with
// kImages float images of its first input, and where to write the first output of each instance for them.
#include <dlfcn.h>
#include <onnxruntime_c_api.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "ep/tests/c_interface.h"

namespace {

constexpr size_t kInstances = 2;
constexpr int64_t kImages = 8;
constexpr int64_t kBatches[] = {1, 3, 4};  // of kImages together

// OnnxLoader::Init and OnnxLoader::Stop.
class Loader {
 public:
  Loader() { Check(g_api->CreateEnv(ORT_LOGGING_LEVEL_WARNING, "log", &env_)); }
  ~Loader() { g_api->ReleaseEnv(env_); }
  Loader(const Loader&) = delete;
  Loader& operator=(const Loader&) = delete;
  OrtEnv* env() const { return env_; }

 private:
  OrtEnv* env_ = nullptr;
};

// ModelState: the options that each instance clones.
class ModelState {
 public:
  ModelState() {
    Check(g_api->CreateSessionOptions(&options_));
    Check(g_api->SetSessionGraphOptimizationLevel(options_, ORT_ENABLE_ALL));
    Check(g_api->SetSessionExecutionMode(options_, ORT_SEQUENTIAL));
    Check(g_api->SetIntraOpNumThreads(options_, 1));  // parameter intra_op_thread_count
  }
  ~ModelState() { g_api->ReleaseSessionOptions(options_); }
  ModelState(const ModelState&) = delete;
  ModelState& operator=(const ModelState&) = delete;
  const OrtSessionOptions* options() const { return options_; }

 private:
  OrtSessionOptions* options_ = nullptr;
};

class ModelInstance {
 public:
  ModelInstance(const Loader& loader, const ModelState& state, const char* library, const char* model) {
    // ModelState::LoadModel
    OrtSessionOptions* options = nullptr;
    Check(g_api->CloneSessionOptions(state.options(), &options));
    try {
      void* handle = nullptr;
      Check(g_api->RegisterCustomOpsLibrary(options, library, &handle));
      Check(g_api->CreateSession(loader.env(), model, options, &session_));
    } catch (...) {
      g_api->ReleaseSessionOptions(options);
      throw;
    }
    Check(g_api->GetAllocatorWithDefaultOptions(&allocator_));
    g_api->ReleaseSessionOptions(options);
    // ModelInstanceState::ModelInstanceState
    Check(g_api->AllocatorGetInfo(allocator_, &cpu_));
    Check(g_api->CreateIoBinding(session_, &binding_));
    Check(g_api->CreateRunOptions(&run_options_));
    input_ = Name(g_api->SessionGetInputName);
    output_ = Name(g_api->SessionGetOutputName);
    OrtTypeInfo* type = nullptr;
    Check(g_api->SessionGetInputTypeInfo(session_, 0, &type));
    const OrtTensorTypeAndShapeInfo* tensor = nullptr;
    Check(g_api->CastTypeInfoToTensorInfo(type, &tensor));
    size_t rank = 0;
    Check(g_api->GetDimensionsCount(tensor, &rank));
    shape_.resize(rank);
    Check(g_api->GetDimensions(tensor, shape_.data(), rank));
    g_api->ReleaseTypeInfo(type);
  }
  ~ModelInstance() {
    ReleaseRunResources();
    g_api->ReleaseRunOptions(run_options_);
    g_api->ReleaseIoBinding(binding_);
    g_api->ReleaseSession(session_);
  }
  ModelInstance(const ModelInstance&) = delete;
  ModelInstance& operator=(const ModelInstance&) = delete;

  // ModelInstanceState::ProcessRequests, for one batch after the other.
  std::vector<float> Process(std::vector<float> images) {
    const size_t image_elements = images.size() / kImages;
    std::vector<float> results;
    float* next = images.data();
    for (const int64_t batch : kBatches) {
      const size_t elements = image_elements * static_cast<size_t>(batch);
      ReleaseRunResources();
      shape_[0] = batch;
      Check(g_api->CreateTensorWithDataAsOrtValue(cpu_, next, elements * sizeof(float), shape_.data(),
                                                  shape_.size(), ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT,
                                                  &input_tensor_));
      Check(g_api->BindInput(binding_, input_.c_str(), input_tensor_));
      Check(g_api->BindOutputToDevice(binding_, output_.c_str(), cpu_));
      Check(g_api->RunWithBinding(session_, run_options_, binding_));
      ReadOutput(results);
      next += elements;
    }
    return results;
  }

 private:
  using GetName = OrtStatus*(ORT_API_CALL*)(const OrtSession*, size_t, OrtAllocator*, char**);
  std::string Name(GetName get) const {
    char* name = nullptr;
    Check(get(session_, 0, allocator_, &name));
    const std::string copy = name;
    Check(g_api->AllocatorFree(allocator_, name));
    return copy;
  }

  void ReadOutput(std::vector<float>& results) {
    size_t count = 0;
    Check(g_api->GetBoundOutputValues(binding_, allocator_, &outputs_, &count));
    if (count != 1) throw std::runtime_error("expected one output");
    OrtTensorTypeAndShapeInfo* info = nullptr;
    Check(g_api->GetTensorTypeAndShape(outputs_[0], &info));
    size_t elements = 0;
    Check(g_api->GetTensorShapeElementCount(info, &elements));
    g_api->ReleaseTensorTypeAndShapeInfo(info);
    void* data = nullptr;
    Check(g_api->GetTensorMutableData(outputs_[0], &data));
    results.insert(results.end(), static_cast<float*>(data), static_cast<float*>(data) + elements);
  }

  void ReleaseRunResources() {
    g_api->ClearBoundInputs(binding_);
    g_api->ReleaseValue(input_tensor_);
    input_tensor_ = nullptr;
    g_api->ClearBoundOutputs(binding_);
    if (outputs_ == nullptr) return;
    g_api->ReleaseValue(outputs_[0]);
    Check(g_api->AllocatorFree(allocator_, static_cast<void*>(outputs_)));
    outputs_ = nullptr;
  }

  OrtSession* session_ = nullptr;
  OrtAllocator* allocator_ = nullptr;   // ONNX Runtime's
  const OrtMemoryInfo* cpu_ = nullptr;  // likewise
  OrtIoBinding* binding_ = nullptr;
  OrtRunOptions* run_options_ = nullptr;
  std::string input_, output_;
  std::vector<int64_t> shape_;
  OrtValue* input_tensor_ = nullptr;
  OrtValue** outputs_ = nullptr;
};

void Serve(char** argv, const std::vector<float>& images, std::ofstream& out) {
  const Loader loader;
  const ModelState state;
  std::vector<float> results[kInstances];
  std::string failures[kInstances];
  std::vector<std::thread> threads;
  threads.reserve(kInstances);
  for (size_t i = 0; i < kInstances; ++i) {
    threads.emplace_back([&, i] {
      try {
        results[i] = ModelInstance(loader, state, argv[2], argv[3]).Process(images);
      } catch (const std::exception& e) {
        failures[i] = e.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (size_t i = 0; i < kInstances; ++i) {
    if (!failures[i].empty()) throw std::runtime_error(failures[i]);
    out.write(reinterpret_cast<const char*>(results[i].data()),
              static_cast<std::streamsize>(results[i].size() * sizeof(float)));
  }
}

// A host that registers the library before it has an environment is no server of Triton's. It gets custom ops,
// and this prints the reason, which its sessions would log.
void RegisterTooEarly(const char* library) {
  const ModelState state;
  OrtSessionOptions* options = nullptr;
  Check(g_api->CloneSessionOptions(state.options(), &options));
  void* handle = nullptr;
  Check(g_api->RegisterCustomOpsLibrary(options, library, &handle));
  int is_refused = 0;
  Check(g_api->HasSessionConfigEntry(options, "lowbit.ep_refused", &is_refused));
  if (is_refused != 0) {
    char reason[1024];
    size_t size = sizeof(reason);
    Check(g_api->GetSessionConfigEntry(options, "lowbit.ep_refused", reason, &size));
    std::puts(reason);
  }
  g_api->ReleaseSessionOptions(options);
}

}  // namespace

int main(int argc, char** argv) {
  void* library = argc == 6 ? dlopen(argv[1], RTLD_NOW) : nullptr;
  if (library == nullptr) return 2;
  g_api = reinterpret_cast<const OrtApiBase* (*)()>(dlsym(library, "OrtGetApiBase"))()->GetApi(24);
  try {
    std::ifstream file(argv[4], std::ios::binary);
    const std::vector<char> bytes((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
    std::vector<float> images(bytes.size() / sizeof(float));
    std::copy(bytes.begin(), bytes.end(), reinterpret_cast<char*>(images.data()));
    std::ofstream out(argv[5], std::ios::binary);
    RegisterTooEarly(argv[2]);
    // Twice: a server that lets its backend go and loads it again has another environment then.
    Serve(argv, images, out);
    Serve(argv, images, out);
    out.close();
    return out.good() ? 0 : 1;
  } catch (const std::exception& e) {
    std::fprintf(stderr, "%s\n", e.what());
    return 1;
  }
}
