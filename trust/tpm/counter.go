package tpm

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"

	gotpm "github.com/google/go-tpm/tpm2"
)

// CounterIndex is the NV index of the counter that says which state of the disk is the newest (B7). 0x01800000 to 0x01BFFFFF are for the owner's indices (TCG Registry of Reserved
// TPM 2.0 Handles and Localities, section 2.2).
const CounterIndex = gotpm.TPMHandle(0x01804D55)

var (
	// ErrNoCounter means that the TPM has no counter at [CounterIndex], or one that was never incremented.
	ErrNoCounter = errors.New("the TPM has no counter")
	// ErrForeignCounter means that something else than Muster's counter is at [CounterIndex]: something that can be set to a value of choice, perhaps.
	ErrForeignCounter = errors.New("the TPM has something else where Muster's counter should be")
)

// counterTemplate is the public area of the counter (Part 2, 13.4, TPMS_NV_PUBLIC). Its auth value is empty, and it is not orderly: each increment is in the
// TPM's non-volatile memory before it is answered (Part 1, 37.3.2).
func counterTemplate() gotpm.TPMSNVPublic {
	return gotpm.TPMSNVPublic{
		NVIndex: CounterIndex, NameAlg: gotpm.TPMAlgSHA256, DataSize: 8,
		Attributes: gotpm.TPMANV{NT: gotpm.TPMNTCounter, AuthRead: true, AuthWrite: true, OwnerRead: true, NoDA: true},
	}
}

// Counter implements [Device].
func (t *TPM) Counter(ctx context.Context) (value uint64, err error) {
	err = t.sequence(ctx, "read counter", func(c *conn) error {
		value, err = c.counter()
		return err
	})
	return value, err
}

// IncrementCounter implements [Device].
func (t *TPM) IncrementCounter(ctx context.Context) (value uint64, err error) {
	err = t.sequence(ctx, "increment counter", func(c *conn) error {
		if _, err := c.counter(); err != nil {
			return err
		}
		value, err = c.increment()
		return err
	})
	return value, err
}

// DefineCounter implements [Device].
func (t *TPM) DefineCounter(ctx context.Context) (value uint64, err error) {
	err = t.sequence(ctx, "define counter", func(c *conn) error {
		owner := gotpm.AuthHandle{Handle: gotpm.TPMRHOwner, Auth: gotpm.PasswordAuth(nil)}
		if public, err := (gotpm.NVReadPublic{NVIndex: CounterIndex}).Execute(c.tpm); err == nil {
			undefine := gotpm.NVUndefineSpace{AuthHandle: owner, NVIndex: gotpm.NamedHandle{Handle: CounterIndex, Name: public.NVName}}
			if _, err := undefine.Execute(c.tpm); err != nil {
				return fmt.Errorf("undefine 0x%08x: %w", uint32(CounterIndex), err)
			}
		} else if !errors.Is(err, gotpm.TPMRCHandle) {
			return fmt.Errorf("read public area of 0x%08x: %w", uint32(CounterIndex), err)
		}
		if _, err := (gotpm.NVDefineSpace{AuthHandle: owner, PublicInfo: gotpm.New2B(counterTemplate())}).Execute(c.tpm); err != nil {
			return fmt.Errorf("define 0x%08x (the owner hierarchy's auth value must be empty): %w", uint32(CounterIndex), err)
		}
		value, err = c.increment()
		return err
	})
	return value, err
}

// counter reads the counter, once its public area says that it can't be set back: attributes, name algorithm and size are those of the template
// (Part 3, 31.6, TPM2_NV_ReadPublic). Whoever has the TPM in hand can put an ordinary index there, of any value.
func (c *conn) counter() (uint64, error) {
	public, err := gotpm.NVReadPublic{NVIndex: CounterIndex}.Execute(c.tpm)
	if errors.Is(err, gotpm.TPMRCHandle) {
		return 0, ErrNoCounter
	}
	if err != nil {
		return 0, fmt.Errorf("read public area: %w", err)
	}
	info, err := public.NVPublic.Contents()
	if err != nil {
		return 0, fmt.Errorf("decode public area: %w", err)
	}
	want := counterTemplate()
	if got := info.Attributes; got != want.Attributes {
		if want.Attributes.Written = true; got != want.Attributes {
			return 0, fmt.Errorf("%w: index 0x%08x has the attributes %+v", ErrForeignCounter, uint32(CounterIndex), got)
		}
	} else {
		return 0, ErrNoCounter // a crash between definition and first increment
	}
	if info.NameAlg != want.NameAlg || info.DataSize != want.DataSize || len(info.AuthPolicy.Buffer) > 0 {
		return 0, fmt.Errorf("%w: index 0x%08x holds %d bytes", ErrForeignCounter, uint32(CounterIndex), info.DataSize)
	}
	b, err := c.readNV(CounterIndex, 8)
	if err != nil {
		return 0, err
	}
	if len(b) != 8 {
		return 0, fmt.Errorf("%d bytes", len(b))
	}
	return binary.BigEndian.Uint64(b), nil
}

// increment adds one and reads the value (Part 3, 31.8, TPM2_NV_Increment). The first increment of a counter gives it the largest value that any
// counter of this TPM has had, plus one (Part 1, 37.3.2): one that was deleted and made anew is never lower.
func (c *conn) increment() (uint64, error) {
	public, err := gotpm.NVReadPublic{NVIndex: CounterIndex}.Execute(c.tpm)
	if err != nil {
		return 0, fmt.Errorf("read public area: %w", err)
	}
	_, err = gotpm.NVIncrement{
		AuthHandle: gotpm.AuthHandle{Handle: CounterIndex, Name: public.NVName, Auth: gotpm.PasswordAuth(nil)},
		NVIndex:    gotpm.NamedHandle{Handle: CounterIndex, Name: public.NVName},
	}.Execute(c.tpm)
	if err != nil {
		return 0, fmt.Errorf("increment: %w", err)
	}
	return c.counter()
}
