"""The demo: a clip through real ComfyUI on any machine, and a report of what the patched attention did to it."""

#: Names of the tiny models, written by `write_models` and asked for by `substitute`.
FILES = {
    "high": "demo_wan2.2_t2v_high_noise.safetensors",
    "low": "demo_wan2.2_t2v_low_noise.safetensors",
    "vae": "demo_wan_vae.safetensors",
}
