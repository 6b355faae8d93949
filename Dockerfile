# tfamp on TensorFlow's own image, which brings CUDA; the GPU needs NVIDIA's container
# toolkit on the host. Build it in a clone, look at the machine, train:
#   docker build -t tfamp .
#   docker run --rm --gpus all tfamp
#   docker run --rm --gpus all -v "$PWD:/work" tfamp python train.py
FROM tensorflow/tensorflow:2.20.0-gpu
# TensorFlow stays at the version of the image, whose CUDA it was built for.
RUN --mount=type=bind,target=/src,rw \
    python -m pip install --no-cache-dir "/src[data,report,gpu]" "tensorflow==2.20.*"
WORKDIR /work
USER 1000
CMD ["tfamp", "doctor"]
