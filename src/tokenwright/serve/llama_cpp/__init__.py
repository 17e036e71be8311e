"""The routes of llama.cpp's server."""
