"""The messages between the server and the page, a module for each panel."""
