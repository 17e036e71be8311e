"""The messages between the server and the page: one module for each panel, and the frame of a step."""
