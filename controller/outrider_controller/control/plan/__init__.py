"""The plan of the cluster: one leader makes it from the routers' evidence, and sends it to all of them.

The decisions themselves are pure and lie in `outrider_controller.autoscaler`; what a router does with them is in
`outrider_controller.router.speculation`. Begin with `leading`.
"""
