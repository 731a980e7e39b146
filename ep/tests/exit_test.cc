// Whether a process ends well that releases ONNX Runtime's environment in a static destructor, as
// applications with a global Ort::Env do. Arguments: the library of ONNX Runtime, that of lowbit.
#include <dlfcn.h>
#include <onnxruntime_c_api.h>

#include <cstdio>

namespace {

struct Environment {
  const OrtApi* api = nullptr;
  OrtEnv* env = nullptr;
  ~Environment() {
    if (env == nullptr) return;
    api->ReleaseEnv(env);
    std::puts("released");
  }
};
Environment g_environment;

bool Failed(OrtStatus* status) {
  if (status != nullptr) std::fputs(g_environment.api->GetErrorMessage(status), stderr);
  return status != nullptr;
}

}  // namespace

int main(int argc, char** argv) {
  void* library = argc == 3 ? dlopen(argv[1], RTLD_NOW) : nullptr;
  if (library == nullptr) return 2;
  const auto base = reinterpret_cast<const OrtApiBase* (*)()>(dlsym(library, "OrtGetApiBase"));
  g_environment.api = base()->GetApi(24);
  if (Failed(g_environment.api->CreateEnv(ORT_LOGGING_LEVEL_WARNING, "exit_test", &g_environment.env)))
    return 2;
  return Failed(g_environment.api->RegisterExecutionProviderLibrary(g_environment.env, "lowbit", argv[2]))
             ? 2
             : 0;
}
