"""The wall: the one place where private parts of torch are named. It imports nothing of ours."""
