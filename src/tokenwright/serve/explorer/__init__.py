"""The explorer's server: runs, their viewers, and the routes of the page's panels."""
