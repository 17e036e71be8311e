"""The server below its APIs: sockets, connections, access control, the access log and traces."""
