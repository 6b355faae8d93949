"""The environment variables that decide how TensorFlow and Keras compute."""

# Environment variable -> what it does.
VARIABLES = {
    "TFAMP_POLICY": "policy of `tfamp.enable()` when it is given none",
    "TFAMP_UNTESTED_KERAS": "1 leaves out the self-test on versions not tested",
    "KERAS_BACKEND": "Keras's backend; has to be tensorflow",
    "KERAS_HOME": "folder of keras.json, which may set a backend too",
    "TF_USE_LEGACY_KERAS": "1 makes tf.keras the old Keras 2",
    "CUDA_VISIBLE_DEVICES": "GPUs that TensorFlow may see; empty or -1 hides all",
    "TF_ENABLE_ONEDNN_OPTS": "0 turns off oneDNN, which bfloat16 on a CPU needs",
    "ONEDNN_MAX_CPU_ISA": "caps the CPU instructions that oneDNN uses",
    "ONEDNN_DEFAULT_FPMATH_MODE": "lets oneDNN round float32 products to fewer bits",
    "TF_XLA_FLAGS": "--tf_xla_auto_jit=2 compiles all graphs with XLA",
    "XLA_FLAGS": "options of the XLA compiler",
    "NVIDIA_TF32_OVERRIDE": "0 turns off TF32 in NVIDIA's libraries",
    "TF_ENABLE_AUTO_MIXED_PRECISION": "1 has TensorFlow lower precision on its own",
    "TF_GPU_ALLOCATOR": "cuda_malloc_async lessens fragmentation of GPU memory",
    "TF_FORCE_GPU_ALLOW_GROWTH": "true takes GPU memory as needed, not all at once",
    "TF_PER_DEVICE_MEMORY_LIMIT_MB": "caps what TensorFlow takes of each GPU",
    "TF_GPU_HOST_MEM_LIMIT_IN_MB": "caps pinned memory for copies to GPUs",
    "XLA_PYTHON_CLIENT_PREALLOCATE": "is read by JAX; TensorFlow does not",
    "TF_DETERMINISTIC_OPS": "1 gives the same result in each run, at some speed",
    "TF_CUDNN_DETERMINISTIC": "1 is the same for cuDNN's convolutions alone",
}
