"""Families with recurrent layers; most have attention in other layers."""
