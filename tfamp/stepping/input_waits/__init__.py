"""`tfamp.data.bottleneck`: whether the input holds training up."""
