// The Gateway API, whose definitions tests compare those of the chart with.
module github.com/tulle-mesh/tulle/tools/gateway-api

go 1.26.0

require sigs.k8s.io/gateway-api v1.5.1
