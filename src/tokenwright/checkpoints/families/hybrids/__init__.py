"""Families with recurrent layers, most of them beside attention."""
