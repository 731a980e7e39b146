// Runs a converted model from C, whose input is float32, on custom ops or on the execution provider:
//
//   run_model model.lowbit.onnx                            links liblowbit and registers its custom ops
//   run_model model.lowbit.onnx /opt/lowbit/lib/liblowbit.so       has ONNX Runtime open it as a provider
//
// examples/c/CMakeLists.txt says how it is built; without CMake, with ONNX Runtime's flags in ORT:
//
//   cc run_model.c $(pkg-config --cflags --libs lowbit) $ORT -o run_model
#include <lowbit.h>
#include <onnxruntime_c_api.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const OrtApi* g_ort;

static void Require(OrtStatus* status) {
  if (status == NULL) return;
  fprintf(stderr, "%s\n", g_ort->GetErrorMessage(status));
  exit(1);
}

static void AppendProvider(OrtEnv* env, OrtSessionOptions* options, const char* library) {
  Require(g_ort->RegisterExecutionProviderLibrary(env, "lowbit", library));
  const OrtEpDevice* const* devices = NULL;
  size_t count = 0;
  Require(g_ort->GetEpDevices(env, &devices, &count));
  for (size_t i = 0; i < count; ++i) {
    if (strcmp(g_ort->EpDevice_EpName(devices[i]), LOWBIT_EP_NAME) != 0) continue;
    // The first is the CPU; NVIDIA GPUs follow where liblowbit_cuda lies beside the library.
    Require(g_ort->SessionOptionsAppendExecutionProvider_V2(options, env, &devices[i], 1, NULL, NULL, 0));
    return;
  }
  fprintf(stderr, "%s offers no device\n", library);
  exit(1);
}

// The shape of the first input or output, with 1 for what is dynamic; returns the number of elements.
static size_t Shape(const OrtTypeInfo* type, int64_t* dims, size_t room, size_t* rank) {
  const OrtTensorTypeAndShapeInfo* tensor = NULL;
  Require(g_ort->CastTypeInfoToTensorInfo(type, &tensor));
  Require(g_ort->GetDimensionsCount(tensor, rank));
  if (*rank > room) {
    fprintf(stderr, "the input has more than %zu dimensions\n", room);
    exit(1);
  }
  Require(g_ort->GetDimensions(tensor, dims, *rank));
  size_t elements = 1;
  for (size_t i = 0; i < *rank; ++i) {
    if (dims[i] < 0) dims[i] = 1;
    elements *= (size_t)dims[i];
  }
  return elements;
}

static void Run(OrtSession* session) {
  OrtAllocator* allocator = NULL;
  Require(g_ort->GetAllocatorWithDefaultOptions(&allocator));
  char *input_name = NULL, *output_name = NULL;
  Require(g_ort->SessionGetInputName(session, 0, allocator, &input_name));
  Require(g_ort->SessionGetOutputName(session, 0, allocator, &output_name));

  OrtTypeInfo* type = NULL;
  Require(g_ort->SessionGetInputTypeInfo(session, 0, &type));
  int64_t dims[8];
  size_t rank = 0;
  const size_t elements = Shape(type, dims, sizeof dims / sizeof dims[0], &rank);
  g_ort->ReleaseTypeInfo(type);
  OrtValue *input = NULL, *output = NULL;
  Require(g_ort->CreateTensorAsOrtValue(allocator, dims, rank, ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT, &input));
  float* pixels = NULL;
  Require(g_ort->GetTensorMutableData(input, (void**)&pixels));
  for (size_t i = 0; i < elements; ++i) pixels[i] = (float)(i % 17) / 16.0f;

  Require(g_ort->Run(session, NULL, (const char* const*)&input_name, (const OrtValue* const*)&input, 1,
                     (const char* const*)&output_name, 1, &output));
  OrtTensorTypeAndShapeInfo* shape = NULL;
  size_t values = 0;
  const float* data = NULL;
  Require(g_ort->GetTensorTypeAndShape(output, &shape));
  Require(g_ort->GetTensorShapeElementCount(shape, &values));
  Require(g_ort->GetTensorMutableData(output, (void**)&data));
  for (size_t i = 0; i < values; ++i) printf("%.9g\n", data[i]);

  g_ort->ReleaseTensorTypeAndShapeInfo(shape);
  g_ort->ReleaseValue(output);
  g_ort->ReleaseValue(input);
  Require(g_ort->AllocatorFree(allocator, output_name));
  Require(g_ort->AllocatorFree(allocator, input_name));
}

int main(int argc, char** argv) {
  if (argc < 2 || argc > 3) {
    fprintf(stderr, "usage: %s MODEL [LIBRARY]\n", argv[0]);
    return 2;
  }
  g_ort = OrtGetApiBase()->GetApi(LOWBIT_ORT_API);
  if (g_ort == NULL) {
    fprintf(stderr, "this needs ONNX Runtime 1.%d or newer\n", LOWBIT_ORT_API);
    return 1;
  }
  OrtEnv* env = NULL;
  OrtSessionOptions* options = NULL;
  OrtSession* session = NULL;
  Require(g_ort->CreateEnv(ORT_LOGGING_LEVEL_WARNING, "run_model", &env));
  Require(g_ort->CreateSessionOptions(&options));
  if (argc == 3) {
    AppendProvider(env, options, argv[2]);
  } else {
    Require(RegisterCustomOps(options, OrtGetApiBase()));
  }
  Require(g_ort->CreateSession(env, argv[1], options, &session));
  Run(session);
  g_ort->ReleaseSession(session);
  g_ort->ReleaseSessionOptions(options);
  g_ort->ReleaseEnv(env);
  return 0;
}
