// The Gateway API. Tests compare the definitions in the chart with those of this module.
module github.com/tulle-mesh/tulle/tools/gateway-api

go 1.26.0

require sigs.k8s.io/gateway-api v1.5.1
