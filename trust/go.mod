module github.com/muster-k8s/muster/trust

go 1.26.0

require (
	github.com/fxamacker/cbor/v2 v2.9.0
	github.com/google/go-tpm v0.9.8
	github.com/muster-k8s/muster/gen v0.0.0
	go.uber.org/goleak v1.3.0
	google.golang.org/protobuf v1.36.12
	pgregory.net/rapid v1.3.0
)

require (
	github.com/x448/float16 v0.8.4 // indirect
	golang.org/x/sys v0.8.0 // indirect
)

// The three modules ship together from one repository.
replace github.com/muster-k8s/muster/gen => ../gen
