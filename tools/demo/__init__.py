"""The demo: a clip through real ComfyUI on any machine, and a report of what the patched attention did to it."""
