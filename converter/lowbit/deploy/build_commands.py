"""BUILD.md: the commands that build ONNX Runtime and lowbit for one exported model."""

from __future__ import annotations

from collections.abc import Mapping

_COMMON = """\
--config MinSizeRel --parallel --skip_tests
--minimal_build custom_ops
--include_ops_by_config {config}
--enable_reduced_operator_type_support
{without_ml}--cmake_extra_defines onnxruntime_BUILD_UNIT_TESTS=OFF"""

_PLATFORMS = {
    "Android": ("", "--android --android_abi arm64-v8a --android_api 27\n"
                "--android_sdk_path $ANDROID_HOME --android_ndk_path $ANDROID_NDK_HOME\n"
                "--android_cpp_shared --build_shared_lib"),
    "iOS": ("", "--ios --use_xcode --apple_sysroot iphoneos --osx_arch arm64 --apple_deploy_target 15.1"),
    "Linux on aarch64": ("on the machine itself; elsewhere add `CMAKE_TOOLCHAIN_FILE=...` to the last option "
                         "and `--path_to_protoc_exe`", "--build_shared_lib"),
}  # fmt: skip

_PRESETS = {
    "Android": "minimal-android-arm64",
    "iOS": "minimal-ios-arm64",
    "Linux on aarch64": "minimal-linux-aarch64",
}


def build_commands(models: Mapping[str, str], config: str, *, classical: bool) -> str:
    """The text of BUILD.md.

    Args:
        models: the names of the .ort files by their style of optimization.
        config: the name of required_operators.config beside them.
        classical: whether the model has ops of ai.onnx.ml.
    """
    without_ml = "" if classical else "--disable_ml_ops\n"
    text = [
        "# Building for this model",
        "",
        f"`{models['fixed']}` needs a minimal build with custom ops. `{models['runtime']}` needs "
        "`--minimal_build extended custom_ops`, and replays its optimizations where the app sets the session "
        "option `session.enable_saved_runtime_optimizations` to 1; it is meant for NNAPI and CoreML, which "
        "take nodes away before. Ship the first unless you use those.",
        "",
        "## ONNX Runtime",
        "",
        "In a checkout of ONNX Runtime 1.24 or newer. Python needs the package `flatbuffers`, or types "
        "are not reduced.",
        "",
    ]
    for platform, (note, options) in _PLATFORMS.items():
        text += [f"{platform}{', ' + note if note else ''}:", ""]
        common = _COMMON.format(config=f"/path/to/{config}", without_ml=without_ml)
        text += [*_command(f"./build.sh {options}\n{common}"), ""]
    text += [
        "## lowbit",
        "",
        "In a checkout of lowbit. The static library holds the ops and kernels that the config names and "
        "nothing else; `docs/mobile.md` says how an app links it.",
        "",
    ]
    for platform, preset in _PRESETS.items():
        command = f"cmake --preset {preset} -DLOWBIT_OPS_CONFIG=/path/to/{config}"
        text += [f"{platform}:", "", f"    {command}", f"    cmake --build --preset {preset}", ""]
    return "\n".join(text)


def _command(lines: str) -> list[str]:
    """One shell command over several lines."""
    first, *others = lines.splitlines()
    joined = [first, *(f"  {line}" for line in others)]
    return [f"    {line}{' ' + chr(92) if line is not joined[-1] else ''}" for line in joined]
