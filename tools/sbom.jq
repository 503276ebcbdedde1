# Merges the component lists of the programs in an image (from cargo-cyclonedx) with its Debian packages.
# Arguments: $image, $version, $debian.
def unique_refs: group_by(."bom-ref") | map(.[0]);

("pkg:oci/\($image)?repository_url=ghcr.io/tulle-mesh/\($image)&tag=\($version)") as $ref
| {
    bomFormat: "CycloneDX",
    specVersion: .[0].specVersion,
    version: 1,
    metadata: {
      timestamp: .[0].metadata.timestamp,
      tools: .[0].metadata.tools,
      component: {type: "container", "bom-ref": $ref, name: $image, version: $version, purl: $ref}
    },
    components: ((map(.metadata.component, .components[]) + $debian) | unique_refs),
    dependencies: (
      [{ref: $ref, dependsOn: (map(.metadata.component."bom-ref") + ($debian | map(."bom-ref")))}]
      + (map(.dependencies[]) | group_by(.ref) | map({ref: .[0].ref, dependsOn: (map(.dependsOn // []) | add | unique)}))
    )
  }
