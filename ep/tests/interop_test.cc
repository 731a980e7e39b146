// What ONNX Runtime's C interface alone offers: an application that shares memory and a timeline semaphore
// with the provider's device, and asks what hardware the provider fits; and how much memory a device has
// left, which ONNX Runtime asks providers itself. The fake device takes files of shared memory for both.
//
// Arguments: the library of ONNX Runtime, that of lowbit, a model with an input "x" of shape [2, 3, 7, 5] and
// one output of the same shape, and the floats of x and of the output.
#include <dlfcn.h>
#include <onnxruntime_c_api.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "ep/tests/c_interface.h"

namespace {

constexpr uint32_t kApi = 24;
constexpr int64_t kShape[] = {2, 3, 7, 5};
constexpr size_t kOffset = 256;  // of the region in the memory
constexpr uint64_t kInputReady = 7, kOutputReady = 9;

void Expect(bool holds, const char* what) {
  if (!holds) throw std::runtime_error(std::string("expected ") + what);
}

// Whether the call is refused with a message that holds `text`.
void ExpectRefusal(OrtStatus* status, const char* text) {
  const std::string message = status == nullptr ? "" : g_api->GetErrorMessage(status);
  g_api->ReleaseStatus(status);
  Expect(message.find(text) != std::string::npos, (std::string(text) + ", got: " + message).c_str());
}

std::vector<uint8_t> Read(const char* path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

// Memory that a file descriptor can be handed out for, as an application of Vulkan has it.
class SharedMemory {
 public:
  explicit SharedMemory(size_t bytes) : bytes_(bytes), file_(memfd_create("interop_test", MFD_CLOEXEC)) {
    Expect(ftruncate(file_, static_cast<off_t>(bytes)) == 0, "memory");
    data_ = static_cast<uint8_t*>(mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file_, 0));
  }
  ~SharedMemory() {
    munmap(data_, bytes_);
    close(file_);
  }
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  uint8_t* data() const { return data_; }
  // Of a descriptor that the import takes over.
  void* Handle() const { return reinterpret_cast<void*>(static_cast<intptr_t>(dup(file_))); }

 private:
  const size_t bytes_;
  const int file_;
  uint8_t* data_ = nullptr;
};

uint32_t ReasonsFor(const OrtEnv* env, OrtHardwareDeviceType type, uint32_t vendor, std::string& notes) {
  OrtHardwareDevice* hardware = nullptr;
  Check(g_api->GetEpApi()->CreateHardwareDevice(type, vendor, 1, "a vendor", nullptr, &hardware));
  OrtDeviceEpIncompatibilityDetails* details = nullptr;
  Check(g_api->GetHardwareDeviceEpIncompatibilityDetails(env, "LowBitExecutionProvider", hardware, &details));
  uint32_t reasons = 0;
  const char* text = nullptr;
  Check(g_api->DeviceEpIncompatibilityDetails_GetReasonsBitmask(details, &reasons));
  Check(g_api->DeviceEpIncompatibilityDetails_GetNotes(details, &text));
  notes = text == nullptr ? "" : text;
  g_api->ReleaseDeviceEpIncompatibilityDetails(details);
  g_api->GetEpApi()->ReleaseHardwareDevice(hardware);
  return reasons;
}

void AskAboutHardware(const OrtEnv* env) {
  for (const auto& [name, type, vendor] : {std::tuple{"cpu", OrtHardwareDeviceType_CPU, 0x8086u},
                                           {"fake gpu", OrtHardwareDeviceType_GPU, 0xfa4eu},
                                           {"nvidia gpu", OrtHardwareDeviceType_GPU, 0x10deu},
                                           {"npu", OrtHardwareDeviceType_NPU, 0x8086u}}) {
    std::string notes;
    const uint32_t reasons = ReasonsFor(env, type, vendor, notes);
    std::printf("%s: %x %s\n", name, reasons, notes.c_str());
  }
}

const OrtEpDevice* FakeDevice(const OrtEnv* env) {
  const OrtEpDevice* const* devices = nullptr;
  size_t count = 0;
  Check(g_api->GetEpDevices(env, &devices, &count));
  for (size_t i = 0; i < count; ++i) {
    const char* name = g_api->GetKeyValue(g_api->EpDevice_EpMetadata(devices[i]), "device");
    if (name != nullptr && std::string(name) == "fake:0") return devices[i];
  }
  return nullptr;
}

void RunOnSharedMemory(OrtEnv* env, const OrtEpDevice* device, const char* model,
                       const std::vector<uint8_t>& x, const std::vector<uint8_t>& expected) {
  const OrtInteropApi& interop = *g_api->GetInteropApi();
  OrtExternalResourceImporter* importer = nullptr;
  Check(interop.CreateExternalResourceImporterForDevice(device, &importer));
  Expect(importer != nullptr, "an importer");
  bool can_import = false;
  Check(interop.CanImportMemory(importer, ORT_EXTERNAL_MEMORY_HANDLE_TYPE_VK_MEMORY_OPAQUE_FD, &can_import));
  Expect(can_import, "memory behind file descriptors");
  Check(interop.CanImportMemory(importer, ORT_EXTERNAL_MEMORY_HANDLE_TYPE_D3D12_HEAP, &can_import));
  Expect(!can_import, "no memory of Direct3D");

  const size_t size = kOffset + 2 * x.size();
  const SharedMemory memory(size), counter(sizeof(uint64_t));
  OrtExternalMemoryDescriptor place{kApi, ORT_EXTERNAL_MEMORY_HANDLE_TYPE_VK_MEMORY_OPAQUE_FD,
                                    memory.Handle(), size, kOffset};
  OrtExternalMemoryHandle* imported = nullptr;
  Check(interop.ImportMemory(importer, &place, &imported));
  OrtExternalMemoryHandle* refused = nullptr;
  place.offset_bytes = size;
  ExpectRefusal(interop.ImportMemory(importer, &place, &refused), "begins at");
  place.handle_type = ORT_EXTERNAL_MEMORY_HANDLE_TYPE_D3D12_HEAP;
  ExpectRefusal(interop.ImportMemory(importer, &place, &refused), "cannot be imported");
  place = {kApi, ORT_EXTERNAL_MEMORY_HANDLE_TYPE_VK_MEMORY_OPAQUE_FD, counter.Handle(), size, 0};
  ExpectRefusal(interop.ImportMemory(importer, &place, &refused), "is no memory of");

  OrtExternalTensorDescriptor tensor{kApi, ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT, kShape, 4, 0};
  OrtValue *input = nullptr, *output = nullptr, *outside = nullptr;
  Check(interop.CreateTensorFromMemory(importer, imported, &tensor, &input));
  tensor.offset_bytes = x.size();
  Check(interop.CreateTensorFromMemory(importer, imported, &tensor, &output));
  tensor.offset_bytes = x.size() + 4;
  ExpectRefusal(interop.CreateTensorFromMemory(importer, imported, &tensor, &outside), "");
  tensor.offset_bytes = size;
  ExpectRefusal(interop.CreateTensorFromMemory(importer, imported, &tensor, &outside), "a tensor begins at");

  const OrtExternalSemaphoreDescriptor fence{kApi, ORT_EXTERNAL_SEMAPHORE_VK_TIMELINE_SEMAPHORE_OPAQUE_FD,
                                             counter.Handle()};
  OrtExternalSemaphoreHandle* semaphore = nullptr;
  Check(interop.ImportSemaphore(importer, &fence, &semaphore));

  OrtSessionOptions* options = nullptr;
  Check(g_api->CreateSessionOptions(&options));
  Check(g_api->SessionOptionsAppendExecutionProvider_V2(options, env, &device, 1, nullptr, nullptr, 0));
  OrtSession* session = nullptr;
  Check(g_api->CreateSession(env, model, options, &session));
  OrtSyncStream* stream = nullptr;
  Check(g_api->CreateSyncStreamForEpDevice(device, nullptr, &stream));
  OrtRunOptions* run = nullptr;
  Check(g_api->CreateRunOptions(&run));
  Check(g_api->AddRunConfigEntry(run, "disable_synchronize_execution_providers", "1"));
  g_api->RunOptionsSetSyncStream(run, stream);

  // All is enqueued before the input is there.
  auto& value = *reinterpret_cast<std::atomic<uint64_t>*>(counter.data());
  Check(interop.WaitSemaphore(importer, semaphore, stream, kInputReady));
  const char *input_name = "x", *output_name = nullptr;
  OrtAllocator* allocator = nullptr;
  Check(g_api->GetAllocatorWithDefaultOptions(&allocator));
  char* name = nullptr;
  Check(g_api->SessionGetOutputName(session, 0, allocator, &name));
  output_name = name;
  Check(g_api->Run(session, run, &input_name, &input, 1, &output_name, 1, &output));
  Check(interop.SignalSemaphore(importer, semaphore, stream, kOutputReady));
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  Expect(value == 0, "a run that waits for its input");
  std::memcpy(memory.data() + kOffset, x.data(), x.size());
  value = kInputReady;
  while (value != kOutputReady) std::this_thread::sleep_for(std::chrono::microseconds(100));
  Expect(std::memcmp(memory.data() + kOffset + x.size(), expected.data(), expected.size()) == 0,
         "the model's output in the application's memory");

  Check(g_api->AllocatorFree(allocator, name));
  g_api->ReleaseValue(input);
  g_api->ReleaseValue(output);
  interop.ReleaseExternalSemaphoreHandle(semaphore);
  interop.ReleaseExternalMemoryHandle(imported);
  g_api->ReleaseRunOptions(run);
  g_api->ReleaseSession(session);
  g_api->ReleaseSyncStream(stream);
  g_api->ReleaseSessionOptions(options);
  interop.ReleaseExternalResourceImporter(importer);
  std::puts("shared");
}

// Releases up to 1.32 ask providers of the name CUDAExecutionProvider alone, so the factory is asked here.
void AskForMemory(const OrtApiBase* base, void* lowbit) {
  OrtEpFactory* factories[4] = {};
  size_t count = 0;
  Check(reinterpret_cast<CreateEpApiFactoriesFn>(dlsym(lowbit, "CreateEpFactories"))("again", base, nullptr,
                                                                                     factories, 4, &count));
  Expect(count == 2, "two factories");
  OrtSessionOptions* options = nullptr;
  OrtKeyValuePairs* metadata = nullptr;
  Check(g_api->CreateSessionOptions(&options));
  g_api->CreateKeyValuePairs(&metadata);
  for (const auto& [factory, device] : {std::pair{factories[0], "cpu"}, {factories[1], "fake:1"}}) {
    g_api->AddKeyValuePair(metadata, "device", device);
    OrtEp* provider = nullptr;
    Check(factory->CreateEp(factory, nullptr, &metadata, 1, options, nullptr, &provider));
    if (provider->GetAvailableResource == nullptr) {
      std::printf("memory of %s: as the host\n", device);
    } else {
      OrtResourceCount available = {};
      Check(provider->GetAvailableResource(provider, &available));
      Expect(available.kind == OrtResourceCountKind_TotalBytes, "a number of bytes");
      std::printf("memory of %s: %llu\n", device,
                  static_cast<unsigned long long>(available.value.total_bytes));
    }
    factory->ReleaseEp(factory, provider);
  }
  g_api->ReleaseKeyValuePairs(metadata);
  g_api->ReleaseSessionOptions(options);
  const auto release = reinterpret_cast<ReleaseEpApiFactoryFn>(dlsym(lowbit, "ReleaseEpFactory"));
  for (size_t i = 0; i < count; ++i) Check(release(factories[i]));
}

}  // namespace

int main(int argc, char** argv) {
  void* library = argc == 6 ? dlopen(argv[1], RTLD_NOW) : nullptr;
  if (library == nullptr) return 2;
  const OrtApiBase* base = reinterpret_cast<const OrtApiBase* (*)()>(dlsym(library, "OrtGetApiBase"))();
  g_api = base->GetApi(kApi);
  try {
    OrtEnv* env = nullptr;
    Check(g_api->CreateEnv(ORT_LOGGING_LEVEL_WARNING, "interop_test", &env));
    Check(g_api->RegisterExecutionProviderLibrary(env, "lowbit", argv[2]));
    AskAboutHardware(env);
    if (const OrtEpDevice* device = FakeDevice(env)) {
      RunOnSharedMemory(env, device, argv[3], Read(argv[4]), Read(argv[5]));
      AskForMemory(base, dlopen(argv[2], RTLD_NOW));
    }
    Check(g_api->UnregisterExecutionProviderLibrary(env, "lowbit"));
    g_api->ReleaseEnv(env);
    return 0;
  } catch (const std::exception& e) {
    std::fprintf(stderr, "%s\n", e.what());
    return 1;
  }
}
